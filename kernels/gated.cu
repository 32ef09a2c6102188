// The activation between the two dense products of an expert: FC1's f32 gate and up into FC2's bf16 input.
//
// Any number of blocks of 256 threads; a thread takes four values.
//
// Defined before this file: ARGUMENTS_BYTES, the size of the host's `GatedArgs`, and what activation.cuh asks for.

#include "activation.cuh"
#include "base.cuh"

/// Mirrored by `GatedArgs` in src/jit/kernels/gated.rs.
struct GatedArgs {
    /// `[num_rows, 2, width]`: gate, then up.
    const float* products;
    /// `[num_rows, width]` bf16.
    u16* inner;
    /// `[3]`: block scales that saturated and that became 0, of which there are none here, and rows stored. Added to.
    u64* counts;
    /// How many rows there are, where only the device knows; else null.
    const u32* live_rows;
    /// Rows, or the most that there may be.
    u64 num_rows;
    /// Width between FC1 and FC2, a multiple of 4.
    u32 width;
    u32 unused;
};

static_assert(sizeof(GatedArgs) == ARGUMENTS_BYTES, "GatedArgs is the host's");

constexpr u32 kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads) activate_rows(const __grid_constant__ GatedArgs args) {
    const u32 groups_a_row = args.width / 4;
    const u64 num_groups = number_of(args.live_rows, args.num_rows) * groups_a_row;
    u32 num_stored = 0;
    for (u64 i = blockIdx.x * static_cast<u64>(kThreads) + threadIdx.x; i < num_groups;
         i += gridDim.x * static_cast<u64>(kThreads)) {
        const u64 row = i / groups_a_row;
        const u32 group = static_cast<u32>(i - row * groups_a_row);
        const float4* products = reinterpret_cast<const float4*>(args.products) + 2 * row * groups_a_row + group;
        const float4 gate = products[0], up = products[groups_a_row];
        u32* to = reinterpret_cast<u32*>(args.inner) + 2 * i;
        to[0] = pack_bf16(activate(gate.x, up.x), activate(gate.y, up.y));
        to[1] = pack_bf16(activate(gate.z, up.z), activate(gate.w, up.w));
        num_stored += group == 0;
    }
    const u32 of_warp = __reduce_add_sync(kAllLanes, num_stored);
    if (threadIdx.x % kWarp == 0 && of_warp != 0) atomicAdd(args.counts + 2, static_cast<u64>(of_warp));
}
