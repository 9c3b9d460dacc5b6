# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurable parts of a policy-gradient step: advantage estimators, objectives, corrections.

Each part is a record in a registry: a pure function of tensors, the settings that the part reads, and its rules.
Importing a registry loads neither torch nor numpy, so that configurations can be checked without these libraries.
Modules here use methods of tensors, and import torch inside functions that need more.
"""
