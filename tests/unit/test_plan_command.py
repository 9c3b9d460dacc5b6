# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe plan`: what it prints, and how it refuses."""

import re
from pathlib import Path

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.config.files import exemplar_names
from nemo_rl_moe.models.megatron.model.releases import ADAM_COPIES_MOMENTS

pytestmark = pytest.mark.megatron

MODEL_CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "assets" / "model_configs"
QWEN3_30B_A3B, QWEN3_1_7B = (f"policy.model_name={MODEL_CONFIGS / name}" for name in ("Qwen3-30B-A3B", "Qwen3-1.7B"))
MEGATRON = "policy.megatron_cfg"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", "--config", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def values(printed: str) -> dict[str, str]:
    """The rows of the plan: two spaces before the label, two or more behind it."""
    rows = [line.strip().split("  ", 1) for line in printed.splitlines() if line.startswith("  ")]
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, str], str]:
    """The rows of a plan that is printed without an error, and all that is printed."""
    code, printed, errors = plan(capsys, *arguments)
    assert (code, errors) == (0, "")
    return values(printed), printed


def test_dense_exemplar(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows, printed = planned(capsys, "grpo_math_1B.yaml", QWEN3_1_7B)
    assert list(tmp_path.iterdir()) == []
    assert rows["workers"] == "8 (1 node x 8 GPUs)"
    assert rows["data parallel (DP)"] == "8"
    assert rows["layers of stage 0"] == "0 to 27"
    assert rows["updates of a step"] == "1"
    assert rows["microbatches of an update"] == "at most 64 on each data-parallel rank, by the samples' lengths"
    assert rows["whole model"] == "1.721 billion (1,720,574,976)"
    # 1,720,574,976 parameters: 2 bytes, 2 bytes, 12 bytes over 8 ranks.
    assert rows["weights (bfloat16)"] == rows["gradients (bfloat16)"] == "3.44"
    assert rows["optimizer: master weights and two moments (float32, sharded)"] == "2.58"
    assert rows["held all the time"] == "9.46"
    assert rows["+ while generating, 64 x 4096 tokens: key-value cache"] == "30.06"
    assert rows["+ CUDA's context and NCCL, an estimate"] == "1.50"
    assert rows["at the fullest moment, at least"] == "41.03", "all that is held, the cache, and the estimate"
    assert not any("expert" in label or "reference" in label for label in rows)
    assert printed.count("the model has no MoE layers: there is nothing to track\n") == 1
    assert printed.count("by arithmetic") == 2


def test_experts_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=4"]
    rows, printed = planned(capsys, "sft_qwen3_30b_a3b.yaml", QWEN3_30B_A3B, *chosen)
    assert rows["expert parallel (EP)"] == "4"
    assert rows["experts of each MoE layer, a rank"] == "32 of 128"
    assert rows["copies of the experts"] == "1"
    assert rows["layers of stage 0"] == "0 to 23; 24 with experts"
    assert rows["layers of stage 1"] == "24 to 47; 24 with experts"
    assert rows["active for each token"] == "3.353 billion (3,353,032,704)"
    # The second stage has the final norm too.
    first, second = (rows[f"each worker of stage {stage}"].split("(")[1].split(")")[0] for stage in (0, 1))
    assert int(second.replace(",", "")) - int(first.replace(",", "")) == 2048
    assert rows["stage 0"] == "stage 1"
    assert [len(row.split()) for label, row in rows.items() if label.startswith("weights")] == [2]
    assert "  moe_router_topk: 8  (config.json: num_experts_per_tok)\n" in printed
    assert "key-value cache" not in printed


def test_interleaved_stages_and_plain_microbatches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODEL_CONFIGS.parents[2])
    chosen = [
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        "policy.train_micro_batch_size=16",
    ]
    rows, printed = planned(capsys, "sft_tiny_moe.yaml", *chosen)
    assert rows["pipeline parallel (PP)"] == "2, 2 pieces a stage"
    assert (rows["layers of stage 0"], rows["layers of stage 1"]) == ("0, 2; 2 with experts", "1, 3; 2 with experts")
    assert rows["microbatches of an update"] == "8 on each data-parallel rank"
    assert "host memory of each worker, by arithmetic, in MB of 1,000,000 bytes:" in printed


def test_a_plan_below_1_gb_is_in_mb(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["policy.model_name=tiny_qwen3_moe_tools", "policy.init=random", "cluster.gpus_per_node=0"]
    rows, printed = planned(capsys, "grpo_math_1B.yaml", *model)
    assert 100 < float(rows["at the fullest moment, at least"]) < 1000
    assert "host memory of each worker, by arithmetic, in MB of 1,000,000 bytes:" in printed


def test_reference_weights_are_reported_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = plan(capsys, "grpo_math_1B.yaml", QWEN3_1_7B, "loss_fn.reference_policy_kl_penalty=0.01")
    assert values(printed)["in the host's memory: reference weights"] == "3.44"


def test_engines_of_vllm_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = planned(capsys, "grpo_qwen3_30b_a3b_vllm.yaml", QWEN3_30B_A3B)
    assert rows["engines"] == "4, of 4 GPUs each"
    assert rows["weights of each rank (bfloat16)"] == "15.29"
    # 48 layers x 1 head x 128 x keys and values x 2 bytes x 4096 tokens.
    assert rows["key-value cache of a sequence, 4096 tokens"] == "0.10"
    held = rows["held all the time"]
    assert rows["held by the trainer while the engine generates, in GB"] == held == "43.56"
    assert rows["kept while the engine sleeps, an estimate, in GB"] == "3.00"
    # Two processes have a context and NCCL each.
    assert rows["smallest GPU on which both fit, in GB"] == f"{(43.56 + 0.32 + 3) / 0.65:.0f}"
    # Trainer, engine, processes, and their sum: 0.35 x 80 is the engine's share, 15.29 + 1.5 its weights and the rest.
    assert rows["when a checkpoint is loaded"].split() == ["43.56", "0.00", "1.50", "45.06"]
    assert rows["when engines start"].split() == ["43.56", "28.00", "3.00", "74.56"]
    # A layer of the engine's weights, which it keeps until all of it has come.
    assert rows["when weights arrive"].split() == ["43.88", "16.79", "3.00", "63.66"]
    assert rows["while responses are generated"].split() == ["43.56", "28.00", "3.00", "74.56"]
    assert rows["when weights arrive beside the cache"].split()[:4] == ["43.88", "28.00", "3.00", "74.88"]
    assert rows["while training"].split() == ["51.19", "1.50", "3.00", "55.69"]
    assert "at the fullest moment, at least" not in rows, "it depends on the card"
    # 0.35 x 80 GB less the weights; 24,576 bytes a token.
    assert rows["GPUs with 80 GB: key-value cache, in GB"] == "12.71, 126 such sequences"
    assert rows["GPUs with 141 GB: key-value cache, in GB"] == "34.06, 338 such sequences"
    # The trainer's ranks keep no cache of their own.
    assert not any(label.startswith("+ while generating") for label in rows)


def test_an_engine_that_finds_no_room_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    key = "policy.generation.vllm"
    _, printed, _ = plan(capsys, "grpo_qwen3_30b_a3b_vllm.yaml", QWEN3_30B_A3B, f"{key}.gpu_memory_utilization=0.5")
    assert values(printed)["GPUs with 80 GB: key-value cache, in GB"] == "they do not fit"
    _, printed, _ = plan(capsys, "grpo_qwen3_30b_a3b_vllm.yaml", QWEN3_30B_A3B, f"{key}.gpu_memory_utilization=1")
    assert values(printed)["smallest GPU on which both fit, in GB"] == "none"


def test_engine_of_vllm_on_cpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODEL_CONFIGS.parents[2])
    model = "policy.model_name=examples/assets/tiny_qwen3_moe"
    code, printed, _ = plan(capsys, "grpo_tiny_moe_vllm.yaml", model)
    assert code == 0
    rows = values(printed)
    assert rows["engines"] == "1"
    assert rows["key-value cache of each engine (policy.generation.vllm.cpu_cache_gib)"] == "1073.74"
    # Two ranks with two buckets of 64 MiB each.
    assert rows["in shared memory while weights are sent, at most"] == "268.44"
    assert "sleep" not in printed


def test_copies_beside_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["policy.generation.backend=megatron_separate", "+cluster.roles.generation={gpus_per_node: 4}"]
    rows, printed = planned(capsys, "grpo_math_1B.yaml", QWEN3_1_7B, *chosen)
    assert rows["engines"] == "4, of 1 GPU each"
    # What the model has not taken of a card is the cache's.
    weights = float(rows["weights of each rank (bfloat16)"])
    (cache,) = (row for label, row in rows.items() if label == "GPUs with 80 GB: key-value cache, in GB")
    assert float(cache.split(",")[0]) == pytest.approx(80 - weights, abs=0.011)
    assert "gpu_memory_utilization" not in printed


def test_ranks_that_share_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [f"{MEGATRON}.context_parallel_size=4", "policy.generation.backend=vllm"]
    rows, _ = planned(capsys, "grpo_math_1B.yaml", QWEN3_1_7B, *chosen, "--target", "8xH100")
    assert (rows["data parallel (DP)"], rows["context parallel (CP)"]) == ("2", "4")
    # Over all eight ranks, as without.
    assert rows["optimizer: master weights and two moments (float32, sharded)"] == "2.58"
    # Inputs of 28 layers of a quarter of the tokens, 2 x 2048 bytes each, and of the last norm with what it gives and
    # gets; logits of a chunk of 1,024 in both types, and the weight's gradient.
    activations = (28 + 3) * 4096 // 4 * 2 * 2048 + (1024 * (4 + 2) + 2048 * 4) * 151936
    label = next(label for label in rows if label.startswith("+ in a backward pass, 4096 tokens"))
    assert rows[label] == f"{activations / 1e9:.2f}"
    assert "context parallel (CP)" not in values(plan(capsys, "grpo_math_1B.yaml", QWEN3_1_7B)[1])


def test_the_vision_towers_activations(capsys: pytest.CaptureFixture[str]) -> None:
    """27 blocks of 8 x 1152 + 2 x 4304 numbers of two bytes, of 4 patches a token: on the first stage alone."""
    model = MODEL_CONFIGS / "Qwen3-VL-30B-A3B-Instruct"

    def rows_of(*overrides: str) -> dict[str, str]:
        recipe = "vlm_grpo_qwen3_vl_30b_a3b.yaml"
        layout = [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=4"]
        code, printed, errors = plan(capsys, recipe, f"policy.model_name={model}", *layout, *overrides)
        assert (code, errors) == (0, "")
        return values(printed)

    a_patch = 27 * (8 * 1152 + 2 * 4304) * 2
    row = "+ of the vision tower, up to {} patches (not in the sums): activations, at least"
    assert rows_of()[row.format(8192 * 4)].split() == [f"{a_patch * 8192 * 4 / 1e9:.2f}", "0.00"]
    limited = rows_of("policy.sequence_packing.train_mb_patches=6000")
    assert limited[row.format(6000)].split() == [f"{a_patch * 6000 / 1e9:.2f}", "0.00"]
    assert not [label for label in rows_of("policy.freeze.vision_tower=true") if "vision tower" in label]


def test_forced_routing_is_shouted(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = plan(capsys, "sft_qwen3_30b_a3b.yaml", QWEN3_30B_A3B, f"{MEGATRON}.moe_router_force_hot_rank=0")
    assert "FORCED ROUTING" in printed


def test_warnings_are_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [f"+{MEGATRON}.moe_router_topk=4", f"+{MEGATRON}.moe_shared_expert_intermediate_size=64"]
    code, printed, _ = plan(capsys, "sft_qwen3_30b_a3b.yaml", QWEN3_30B_A3B, *chosen, "policy.init=pretrained")
    assert code == 0
    warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert any("moe_router_topk: 4 takes the place of the model's own 8" in line for line in warnings)
    assert any("64 has no place in a qwen3_moe config.json" in line for line in warnings)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [
                "sft_qwen3_30b_a3b.yaml",
                QWEN3_30B_A3B,
                f"{MEGATRON}.expert_model_parallel_size=3",
                "cluster.gpus_per_node=9",
            ],
            "policy.train_global_batch_size: got 64, expected a multiple of 9",
        ),
        (
            [
                "sft_qwen3_30b_a3b.yaml",
                QWEN3_30B_A3B,
                f"{MEGATRON}.pipeline_model_parallel_size=32",
                "cluster.num_nodes=32",
            ],
            f"{MEGATRON}.pipeline_model_parallel_size: got 32 (x 1 virtual stages), which does not divide",
        ),
        (
            ["grpo_math_1B.yaml", QWEN3_1_7B, f"{MEGATRON}.expert_model_parallel_size=2"],
            f"{MEGATRON}.expert_model_parallel_size: got 2, expected 1: the model has no experts",
        ),
        (["grpo_math_1B.yaml"], "policy.model_name: got 'Qwen/Qwen3-1.7B', which is no folder here, and config.json"),
        (["grpo_math_1B.yaml", "policy.model_name=./nothing"], "policy.model_name: nothing not found"),
        (["sft_qwen3_30b_a3b.yaml", QWEN3_30B_A3B, "sft.sed=1"], "sft.sed: unknown key"),
        (
            ["sft_qwen3_30b_a3b.yaml", "--target", "8xH10"],
            "--target: got the card H10, expected one of A100-40GB, A100-80GB, H100,",
        ),
        (
            ["sft_qwen3_30b_a3b.yaml", "--target", "H100"],
            "--target: got 'H100', expected GPUSxCARD or NODESxGPUSxCARD, such as",
        ),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, errors = plan(capsys, *arguments)
    assert (code, printed) == (2, "")
    assert errors.startswith(f"error: {expected}")
    assert errors.count("\n") == 1


def test_the_30b_recipe_fits_eight_cards_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed = planned(capsys, "grpo_qwen3_30b_a3b_80gb.yaml", QWEN3_30B_A3B, "--target", "8xH100")
    assert rows["workers"] == "8 (1 node x 8 GPUs)"
    # Each rank updates 3,624 million parameters of experts and an eighth of 1,541 million others, at 4 + 2 + 2 bytes.
    assert rows["optimizer: master weights (float32) and two moments (bfloat16, sharded)"] == "30.53"
    assert rows["held while training"] == "51.19"
    copied = "2.15" if ADAM_COPIES_MOMENTS else None  # of 2^28 parameters, twice 4 bytes
    assert rows.get("+ in the optimizer: moments (float32)") == copied
    assert rows["held while generating: weights"] == "10.33"
    assert rows["in the host's memory: optimizer, while generating"] == "30.53"
    fullest = rows["at the fullest moment, at least"]
    ending = f" of the 80 GB of each H100 to spare: {fullest} GB while training\n"
    spare = re.search(rf"  8xH100: fits, with (\d+)%{re.escape(ending)}", printed)
    assert spare is not None
    assert int(spare[1]) == 10


LORA_RECIPE = ("grpo_qwen3_30b_a3b_lora.yaml", QWEN3_30B_A3B)
ON_ONE_GPU = ("policy.megatron_cfg.expert_model_parallel_size=1", "--target", "1xH100")


def test_adapters_of_the_30b_model_fit_two_cards_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed = planned(capsys, *LORA_RECIPE, "--target", "2xH100")
    # 48 layers x rank 32 x (q 2048 + 4096, k and v 2048 + 512 each, o 4096 + 2048), whole on each worker.
    attention = 48 * 32 * (6144 + 2 * 2560 + 6144)
    # Of half of the 128 experts, three products between 2048 and 768.
    experts = 48 * 64 * 32 * 3 * (2048 + 768)
    assert (attention, experts) == (26_738_688, 830_472_192)
    assert rows["each worker: adapters"].startswith(f"0.857 billion ({attention + experts:,}), of them 0.830 billion")
    assert rows["each worker: frozen"] == "16.037 billion (16,036,608,000)"
    assert rows["weights (bfloat16)"] == "33.79"
    # Of experts all, of attention half: 12 bytes each.
    assert rows["optimizer: master weights and two moments (float32, sharded)"] == "10.13"
    assert "in the host's memory: reference weights" not in rows, "the base is the reference"
    assert "  2xH100: fits, with 31% of the 80 GB of each H100 to spare: 55.29 GB while responses" in printed


def test_adapters_of_the_30b_model_on_one_card_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    """One for all experts of a layer fits; one for each has 20 GB of optimizer state."""
    code, printed, errors = plan(capsys, *LORA_RECIPE, "policy.lora.experts=shared", *ON_ONE_GPU)
    assert (code, errors) == (0, "")
    assert values(printed)["each worker: adapters"] == f"{26_738_688 + 48 * 32 * 3 * (2048 + 768):,}"
    assert "  1xH100: fits, with 13% of the 80 GB of each H100 to spare: 69.72 GB while responses" in printed
    _, printed, _ = plan(capsys, *LORA_RECIPE, *ON_ONE_GPU)
    assert values(printed)["optimizer: master weights and two moments (float32, sharded)"] == "20.25"
    assert "  1xH100: does not fit: 99.38 GB while responses are generated are more than the 80 GB" in printed


def test_a_target_stands_for_its_machines(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ("grpo_qwen3_30b_a3b.yaml", QWEN3_30B_A3B)
    _, printed, _ = plan(capsys, *recipe, "--target", "8xA100-80GB")
    expected = "  8xA100-80GB: does not fit: 83.22 GB while training are more than the 80 GB of each A100-80GB\n"
    assert expected in printed
    assert values(printed)["at the fullest moment, at least"] == "83.22"
    # What a laptop cannot compute with may be planned.
    of_gpus = [f"{MEGATRON}.moe_grouped_gemm=true", f"{MEGATRON}.moe_permute_fusion=true"]
    code, _, errors = plan(capsys, *recipe, *of_gpus)
    assert code == 2
    code, printed, errors = plan(capsys, *recipe, *of_gpus, "--target", "2x8xH200", "cluster.num_nodes=7")
    assert (code, errors) == (0, "")
    assert values(printed)["workers"] == "16 (2 nodes x 8 GPUs)"
    assert "of the 141 GB of each H200 to spare: " in printed
    assert plan(capsys, *recipe, *of_gpus)[0] == 2, "and leaves no trace"


def test_an_engine_beside_the_trainer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["policy.generation.vllm.gpu_memory_utilization=0.8", "--target", "8xH100"]
    settings = [
        "grpo_qwen3_30b_a3b_80gb.yaml",
        QWEN3_30B_A3B,
        "policy.generation.backend=vllm",
        "policy.generation.vllm.tensor_parallel_size=4",
    ]
    _, printed, _ = plan(capsys, *settings, *chosen)
    # 0.8 x 80 GB beside 10.33 GB of weights and two processes.
    again = "when weights arrive beside the cache"
    assert f"  8xH100: fits, with 3% of the 80 GB of each H100 to spare: 77.65 GB {again}\n" in printed
    assert values(printed)["when engines start"].split() == ["10.33", "64.00", "3.00", "77.33"]
    assert values(printed)["when a checkpoint is loaded"].split()[-1] == "52.69"
    assert values(printed)["held by the trainer while the engine generates, in GB"] == "10.33"
    _, printed, _ = plan(capsys, *settings, *chosen, "policy.offload_optimizer_for_generation=false")
    assert f"  8xH100: does not fit: 118.51 GB {again} are more than the 80 GB" in printed
    assert values(printed)["when engines start"].split() == ["51.19", "64.00", "3.00", "118.19"]
    # All 61 GB of weights on one GPU, of which the engine may take 48.
    whole = [*settings[:-1], "policy.generation.vllm.gpu_memory_utilization=0.6", "--target", "8xH100"]
    _, printed, _ = plan(capsys, *whole)
    assert "  8xH100: does not fit: an engine's weights and a cache are more than its share of the 80 GB" in printed
    assert values(printed)["GPUs with 80 GB: key-value cache, in GB"] == "they do not fit"


OFFLOAD_TO_THE_HOST = (
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer=true {MEGATRON}.optimizer.optimizer_cpu_offload=true"
)
SHARE = "policy.generation.vllm.gpu_memory_utilization"
HELP: list[tuple[list[str], list[str]]] = [
    (
        [
            "grpo_qwen3_30b_a3b_80gb.yaml",
            *("policy.generation.backend=vllm", "policy.generation.vllm.tensor_parallel_size=4", f"{SHARE}=0.8"),
            "policy.offload_optimizer_for_generation=false",
        ],
        # The first value is that of the recipe's test, with the offload.
        ["policy.offload_optimizer_for_generation=true (77.65 of 80 GB)", f"{SHARE}=0.3 (78.51 of 80 GB)"],
    ),
    (
        ["sft_qwen3_30b_a3b.yaml", f"{MEGATRON}.expert_model_parallel_size=2"],
        [f"{OFFLOAD_TO_THE_HOST} (68.68 of 80 GB)"],
    ),
]


@pytest.mark.parametrize(("words", "changes"), HELP)
def test_a_plan_that_does_not_fit_names_changes_with_which_it_does(
    words: list[str], changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [words[0], QWEN3_30B_A3B, *words[1:], "--target", "8xH100"]
    code, printed, errors = plan(capsys, *chosen)
    assert (code, errors) == (0, "")
    found = re.findall(r"^    fits with (.*)$", printed, re.MULTILINE)
    assert found == changes
    for line in found:
        change, _, sizes = line.partition(" (")
        again = plan(capsys, *chosen, *change.split())[1]
        assert "  8xH100: fits, with " in again
        assert f" to spare: {sizes.split()[0]} GB " in again
        assert "fits with" not in again


def test_a_plan_that_no_single_change_makes_fit_names_the_nearest_and_recipes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines = ["policy.generation.backend=vllm", "policy.generation.vllm.tensor_parallel_size=1"]
    chosen = ["grpo_qwen3_30b_a3b.yaml", QWEN3_30B_A3B, *engines, "--target", "8xH100"]
    printed = plan(capsys, *chosen)[1]
    recipes = re.findall(r"^    shipped configurations of the model that fit: (.*)$", printed, re.MULTILINE)
    assert "grpo_qwen3_30b_a3b_8xh100.yaml (75.40 of 80 GB)" in recipes[0]
    assert "2x8xh100" not in recipes[0], "its engines have another machine"
    assert "fits with" not in printed
    small = ["grpo_qwen3_30b_a3b_8xh100.yaml", QWEN3_30B_A3B, "--target", "8xA100-40GB"]
    printed = plan(capsys, *small)[1]
    nearest = re.search(r"^    no single change fits; the nearest is (.*) \((.*) of 40 GB\)$", printed, re.MULTILINE)
    assert nearest is not None
    assert f"  8xA100-40GB: does not fit: {nearest[2]} GB " in plan(capsys, *small, *nearest[1].split())[1]
    assert "shipped configurations" not in printed


def test_unreadable_configuration_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    code, _, errors = plan(capsys, "grpo_math_1B.yaml", f"policy.model_name={tmp_path}")
    assert code == 2
    assert errors.startswith("error: policy.model_name: config.json: model_type 'unheard-of' is not supported; ")
    assert errors.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "nemo-rl-moe plan --config grpo_math_1B.yaml policy.model_name=" in printed
    assert "without starting it" in printed


SHIPPED = {
    "sft_qwen3_30b_a3b.yaml": ("Qwen3-30B-A3B", "8xH200"),
    "dpo.yaml": ("Qwen3-30B-A3B", "8xH200"),
    "rm.yaml": ("Qwen3-30B-A3B", "8xH200"),
    "grpo_math_1B.yaml": ("Qwen3-1.7B", "8xH100"),
    "ppo_math_1B.yaml": ("Qwen3-1.7B", "8xH100"),
    "distillation_math.yaml": ("Qwen3-1.7B", "8xH100"),
    "grpo_dapo17k.yaml": ("Qwen3-30B-A3B", "8xH20"),
    "grpo_glm_4_5_air_lora.yaml": ("GLM-4.5-Air", "8xH100"),
    "grpo_glm_4_7_flash.yaml": ("GLM-4.7-Flash", "8xH100"),
    "grpo_qwen3_30b_a3b.yaml": ("Qwen3-30B-A3B", "8xH20"),
    "grpo_qwen3_30b_a3b_80gb.yaml": ("Qwen3-30B-A3B", "8xA100-80GB"),
    "grpo_qwen3_30b_a3b_lora.yaml": ("Qwen3-30B-A3B", "2xA100-80GB"),
    "grpo_qwen3_30b_a3b_vllm.yaml": ("Qwen3-30B-A3B", "2x8xA100-80GB"),
    "grpo_qwen3_30b_a3b_8xh100.yaml": ("Qwen3-30B-A3B", "8xH100"),
    "grpo_qwen3_30b_a3b_8xh100_r3.yaml": ("Qwen3-30B-A3B", "8xH100"),
    "grpo_qwen3_30b_a3b_2x8xh100.yaml": ("Qwen3-30B-A3B", "8xH100"),
    "vlm_grpo_3B.yaml": ("Qwen2.5-VL-3B-Instruct", "2xA100-80GB"),
    "vlm_grpo_qwen3_vl_30b_a3b.yaml": ("Qwen3-VL-30B-A3B-Instruct", "8xA100-80GB"),
}
"""Each recipe for GPUs: its model, and machines of the kind that it is written for."""


def test_every_recipe_for_gpus_has_a_target() -> None:
    of_cpus = {"grpo_generate.yaml", "grpo_serve.yaml", "sft_real_moe.yaml", "grpo_real_moe.yaml"}
    assert {name for name in exemplar_names() if "tiny" not in name and name not in of_cpus} == SHIPPED.keys()


TEACHER = f"distillation.teachers.teacher.model_name={MODEL_CONFIGS / 'Qwen3-30B-A3B'}"


def role_rows(printed: str) -> dict[str, list[float]]:
    """Weights, gradients, optimizer, process and sum of each role."""
    lines = re.findall(r"^  (\w+): \S+, \d+ workers?  +(.*)$", printed, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split()] for name, cells in lines}


def test_a_critic_and_a_reward_model_beside_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    section = (
        f"reward_model={{model_name: {MODEL_CONFIGS / 'Qwen3-1.7B'}, adapter: null, logprob_batch_size: 1, weight: 1.0,"
        " megatron_cfg: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, expert_model_parallel_size: 1,"
        " expert_tensor_parallel_size: 1, sequence_parallel: false}}"
    )
    own = (section, "+cluster.roles.reward_model={num_nodes: 1, gpus_per_node: 2}")
    code, printed, errors = plan(capsys, "ppo_math_1B.yaml", QWEN3_1_7B, *own)
    assert (code, errors) == (0, "")
    rows = role_rows(printed)
    # As the policy, 1,720,574,976 parameters: 2 bytes, 2 bytes, 12 bytes over 8 ranks; and 1.5 GB of a process.
    assert rows["critic"] == [3.44, 3.44, 2.58, 1.5, 10.96]
    # Half of 28 layers of 50,336,000 parameters and one of two copies of the embeddings, with the norm.
    assert rows["reward_model"] == [2.03, 0, 0, 1.5, 3.53]
    assert "reward_model: " in printed
    assert "Memory of each worker beside the policy" not in plan(capsys, "grpo_math_1B.yaml", QWEN3_1_7B)[1]


def test_adapters_of_a_critic_leave_gradients_and_optimizer_to_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = "rank: 32, alpha: 64, use_rslora: false, targets: [all-linear], dropout: 0, init: kaiming, path: null"
    lora = f"value.lora={{{adapters}, experts: none}}"
    code, printed, errors = plan(capsys, "ppo_math_1B.yaml", QWEN3_1_7B, lora)
    assert (code, errors) == (0, "")
    # 28 layers of 32 x 38,912 parameters: 2 bytes beside the base, 2 bytes, 12 bytes over 8 ranks.
    assert role_rows(printed)["critic"] == [3.51, 0.07, 0.05, 1.5, 5.13]


def test_a_teacher_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    one_rank = "distillation.teachers.teacher.megatron_cfg.expert_model_parallel_size=1"
    words = ["distillation_math.yaml", QWEN3_1_7B, TEACHER]
    code, printed, errors = plan(capsys, *words, "--target", "8xH100")
    assert (code, errors) == (0, "")
    teacher = role_rows(printed)["teacher"]
    assert f"  8xH100: teacher fits: {teacher[-1]:.2f} of 80 GB\n" in printed
    printed = plan(capsys, *words, one_rank, "--target", "8xH100")[1]
    assert "  8xH100: teacher fits: 62.56 of 80 GB\n" in printed, "61.06 GB and a process"
    printed = plan(capsys, *words, one_rank, "--target", "8xA100-40GB")[1]
    assert "  8xA100-40GB: teacher does not fit: 62.56 of 40 GB\n" in printed


def test_a_role_without_its_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = plan(capsys, "ppo_math_1B.yaml", QWEN3_1_7B, "value.model_name=no_such_owner/none")
    assert code == 2
    assert errors.startswith("error: value.model_name: got 'no_such_owner/none', ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("recipe", SHIPPED)
def test_shipped_recipes_fit(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = SHIPPED[recipe]
    teacher = (TEACHER,) if recipe.startswith("distillation") else ()
    chosen = (f"policy.model_name={MODEL_CONFIGS / model}", *teacher)
    code, printed, errors = plan(capsys, recipe, *chosen, "--target", target)
    assert (code, errors) == (0, "")
    verdict = re.search(rf"  {target}: fits, with (\d+)% of .* to spare: (\d+\.\d\d) GB ", printed)
    assert verdict is not None, printed
    assert int(verdict[1]) >= 5
    rows = values(printed)
    sums = [float(row.split()[3]) for label, row in rows.items() if label.startswith(("when ", "while "))]
    assert rows.get("at the fullest moment, at least", f"{max([0, *sums]):.2f}") == verdict[2], "one number"
