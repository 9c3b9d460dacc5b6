# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a policy-gradient step that a configuration names: advantage estimators, objectives, corrections.

Each is a record in a registry: a pure function of tensors, the settings that it reads, and its rules. Importing a
registry loads neither torch nor numpy, so that a configuration is checked against it without them: modules here use
methods of tensors, and import torch where they need more.
"""
