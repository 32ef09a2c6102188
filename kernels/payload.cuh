// Where the parts of a travelling token lie: values, then ids, then weights, as src/dispatch/layout.rs has them. Who packs
// and who unpacks read it here.
//
// Defined before this file:
//   HIDDEN            width, a multiple of 16
//   PAYLOAD_BITS      32: values travel as f32; 16: as bf16; 4: as NVFP4
#pragma once

#include "base.cuh"

static_assert(HIDDEN % 16 == 0, "tokens are made of whole blocks");
static_assert(PAYLOAD_BITS == 32 || PAYLOAD_BITS == 16 || PAYLOAD_BITS == 4, "tokens are f32, bf16 or NVFP4");

constexpr u32 kBlocks = HIDDEN / 16;
/// Bytes of a token's values, or of its codes and scales; what follows is aligned to words.
constexpr u32 kPayloadBytes = PAYLOAD_BITS == 4 ? HIDDEN / 2 + kBlocks : HIDDEN * PAYLOAD_BITS / 8;
constexpr u32 kIdsAt = ceil_div(kPayloadBytes, 4u) * 4;
