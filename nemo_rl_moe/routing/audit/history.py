# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""History of an audit: earlier steps with which a step is compared."""

from nemo_rl_moe.routing.audit.expert_bias import BiasHistory
from nemo_rl_moe.routing.audit.prefixes import PrefixHistory
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription


class RunHistory:
    """Earlier steps of one run, to find an engine without new weights or a frozen expert bias. Steps come in order."""

    def __init__(self, description: CaptureDescription):
        self.prefixes = PrefixHistory()
        self.biases = BiasHistory(description.bias_is_updated)
