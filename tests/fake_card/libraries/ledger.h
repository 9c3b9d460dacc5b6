// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The bytes of each card that are in use, by all processes that share FAKE_CARD_FOLDER.
#pragma once
#include <cstddef>

namespace fake_card {

// False if the card has not so many bytes left. A negative number gives bytes back.
bool charge(int device, long bytes);
size_t used(int device);

}  // namespace fake_card
