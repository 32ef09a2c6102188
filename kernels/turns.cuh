// When a launch that was queued before anybody knew begins, and with how many of its blocks: launches that compute one batch, one behind
// the other or at once.
//
// Each is launched so that it may begin as soon as every block of the one before it has let it, or has ended. Where launches are to
// run at once, all do so first thing. So whoever begins finds all blocks of the one before it at work or gone, and none of them waits for
// room: blocks may wait for each other, however many there are. Else a launch waits for the end of the one before it,
// which has then waited for those before.
#pragma once

#include "base.cuh"
#include "experts.cuh"

/// Whether this block has anything to do. Every thread asks, before anything else.
DEVICE bool takes_part(const GroupedGemmArgs& args) {
    if (args.dealt == nullptr) return true;
    if (args.dealt->lets_next != 0) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    return blockIdx.x < args.dealt->num_blocks;
}
