// A few tokens of a whole step from where they are to where their experts read them, in one launch: counted, packed and stored
// into every rank's region, and taken from there. Bit for bit what dispatch.cu and receive.cu make of them.
//
// Each word of 4 bytes travels with its chunk's epoch in one store of 8, so that nothing has to be waited for but itself: of how
// many there are, of ids and weights, of values. How many rows each expert has follows from the ids. Counts travel beside
// them, with a flag, for the host, and for layer and step, which are in no tag.
//
// Blocks have one of five parts: one block tells, others send; one block makes the index of rows, one hands counts to the host,
// others take values. Those that send wait for nothing.
//
// NOTE: an aligned access of 8 bytes is single; of a vector of two each is.
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `FewArgs`
//   HIDDEN, PAYLOAD_BITS, QUANTISE   as for dispatch.cu and receive.cu

#include "base.cuh"
#include "few.cuh"
#include "few_send.cuh"
#include "few_take.cuh"

/// Dynamic shared memory: what telling or the index needs, whichever is more.
extern "C" __global__ void __launch_bounds__(kThreads, kReadWords > 8 ? 1 : 2) carry_few(const __grid_constant__ FewArgs args) {
    extern __shared__ u32 room[];
    if (blockIdx.x < args.num_send_blocks) {
        send_few(args, blockIdx.x, room);
        return;
    }
    if (!take_few(args, blockIdx.x - args.num_send_blocks, room) && threadIdx.x == 0) hold_back(args.hear);
}
