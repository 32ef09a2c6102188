// Experts that give back what they get: for those who look at dispatch and combine alone.
//
// Any number of blocks of 256 threads; each takes rows blockIdx.x, blockIdx.x + gridDim.x, ...
//
// Defined before this file:
//   ARGUMENTS_BYTES   the size of the host's `EchoArgs`
//   HIDDEN            width, a multiple of 16

#include "base.cuh"

constexpr u32 kThreads = 256;

/// Mirrored by `EchoArgs` in src/jit/kernels/echo.rs.
struct EchoArgs {
    /// `[.., HIDDEN]` bf16.
    const u8* tokens;
    /// `[num_rows]` the token of each row.
    const u32* row_token;
    /// `[num_rows, HIDDEN]` f32.
    u8* rows;
    /// How many there are, where only the device knows; else null.
    const u32* live_rows;
    /// Rows, or the most that there may be.
    u64 num_rows;
};

static_assert(sizeof(EchoArgs) == ARGUMENTS_BYTES, "EchoArgs is the host's");

extern "C" __global__ void __launch_bounds__(kThreads) echo_tokens(const __grid_constant__ EchoArgs args) {
    const u64 num_rows = number_of(args.live_rows, args.num_rows);
    for (u64 row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const u8* from = args.tokens + static_cast<u64>(args.row_token[row]) * (HIDDEN * 2);
        u8* to = args.rows + row * (HIDDEN * 4);
        for (u32 column = threadIdx.x * 4; column < HIDDEN; column += kThreads * 4) {
            const u64 words = *reinterpret_cast<const u64*>(from + column * 2);
            Word4 values;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) values.v[i] = static_cast<u32>(words >> (16 * i)) << 16;
            *reinterpret_cast<Word4*>(to + column * 4) = values;
        }
    }
}
