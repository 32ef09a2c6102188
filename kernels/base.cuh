// Types and one-instruction wrappers that every kernel uses. sm_80 and up.
//
// NOTE: NVRTC compiles these sources without any header of CUDA's: everything that is not a keyword stands here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "widths of the integer types");

#define DEVICE __device__ __forceinline__

constexpr u32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

/// The number of this warp in its block. All lanes call it.
///
/// NOTE: the compiler sees that it is one number. Of `threadIdx.x / kWarp` it does not, and where a warp's role follows from
/// that, what all lanes have in common is computed by each: 15 to 20 % more instructions in loops around wgmma.
DEVICE u32 warp_idx() { return __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0); }

template <typename T>
DEVICE constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

template <typename T>
DEVICE constexpr T min_of(T a, T b) { return a < b ? a : b; }

/// Four words, as one 16-byte access moves them.
struct alignas(16) Word4 {
    u32 v[4];
};

/// How many there are: what the device has counted, or where the host knows it, what it says.
DEVICE u64 number_of(const u32* live, u64 known) { return live != nullptr ? *live : known; }

/// What the lanes up to this one have together, of `kLanes` that lie one behind the other. All lanes of a warp call it.
template <u32 kLanes = kWarp>
DEVICE u32 sum_through(u32 mine) {
    u32 through = mine;
#pragma unroll
    for (u32 distance = 1; distance < kLanes; distance *= 2) {
        const u32 other = __shfl_up_sync(kAllLanes, through, distance, kLanes);
        if (threadIdx.x % kLanes >= distance) through += other;
    }
    return through;
}

// ---- bits ----

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }

/// Two floats rounded to bf16, ties to even; `low` in the low half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// `2^x`, within 2 ulp; overflows to infinity and underflows to 0.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// `1 / x`, within 1 ulp; 0 of infinity.
DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory ----

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DEVICE Word4 load_shared4(u32 address) {
    Word4 w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "r"(address));
    return w;
}

DEVICE u32 load_shared(u32 address) {
    u32 w;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address));
    return w;
}

DEVICE u32 load_shared_u16(u32 address) {
    u16 w;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(w) : "r"(address));
    return w;
}

DEVICE void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void store_shared4(u32 address, const Word4& w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]), "r"(w.v[3]) : "memory");
}

DEVICE void store_shared_u16(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// ---- global memory ----

/// Read past L1: for what another block wrote in this launch, or is read once.
DEVICE Word4 load_global4_cg(const void* pointer) {
    Word4 w;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.v[0]), "=r"(w.v[1]), "=r"(w.v[2]), "=r"(w.v[3]) : "l"(pointer));
    return w;
}

DEVICE u32 load_global_cg(const u32* pointer) {
    u32 w;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(w) : "l"(pointer));
    return w;
}

DEVICE void store_global4_cg(void* pointer, const Word4& w) {
    asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(pointer), "r"(w.v[0]), "r"(w.v[1]), "r"(w.v[2]), "r"(w.v[3]) : "memory");
}

/// Adds to a count after all that this thread has seen written.
DEVICE void add_release(u32* count, u32 value) {
    __threadfence();
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(value) : "memory");
}

/// Reads a count before all that this thread does next.
DEVICE u32 load_acquire(const u32* count) {
    u32 value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}

/// 16 bytes from global to shared memory, or 16 zeros where `take` is false. The address must be valid either way.
DEVICE void copy_async16(u32 shared, const void* global, bool take) {
    const u32 num_bytes = take ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(num_bytes) : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups are under way.
template <u32 kPending>
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// ---- tensor cores ----

/// `c += a * b` for a 16 x 16 tile of weights and 16 x 8 of tokens.
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
