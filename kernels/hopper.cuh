// What sm_90a has beyond sm_80: barriers in shared memory, bulk copies that complete on them, wgmma.
#pragma once

#include "base.cuh"

// ---- barriers ----

DEVICE void barrier_init(u32 barrier, u32 num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals));
}

/// Makes initialised barriers known to the copy engine.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Arrives, and lets the phase wait for so many copied bytes more.
DEVICE void barrier_expect(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Waits until the phase of this parity is over.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        " @done bra over_%=;\n bra again_%=;\nover_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

/// A barrier of `kThreads` threads of a block, under a number of its own.
template <u32 kThreads>
DEVICE void named_barrier(u32 number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// ---- bulk copies ----

/// `num_bytes` (a multiple of 16) from global to shared memory.
///
/// NOTE: with a cache hint of evict_normal this streams 15 to 18 % slower on H200; with none it runs at the full rate.
DEVICE void bulk_load(u32 shared, const void* global, u32 num_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared), "l"(global), "r"(num_bytes), "r"(barrier) : "memory");
}

/// A cache hint: what is read with it is the first to leave L2.
DEVICE u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/// As `bulk_load`, of what is read once.
DEVICE void bulk_load(u32 shared, const void* global, u32 num_bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared), "l"(global), "r"(num_bytes), "r"(barrier), "l"(policy) : "memory");
}

/// `num_bytes` from shared to global memory, as one group of the calling thread.
DEVICE void bulk_store(void* global, u32 shared, u32 num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(global), "r"(shared), "r"(num_bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until this thread's stores have read their shared memory.
DEVICE void bulk_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

DEVICE void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Orders this thread's ordinary accesses to shared memory before what copy engine and tensor cores do to it.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Orders what this thread has seen of global memory before copies that it issues.
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- wgmma ----

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most `kPending` groups are under way.
template <u32 kPending>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

/// Keeps the compiler from moving reads of an accumulator over the wait before.
template <u32 kHeld, u32 kTiles>
DEVICE void wgmma_hold(float (&acc)[kTiles][4]) {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
        asm volatile("" : "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])::"memory");
    }
}

/// The descriptor of a B operand: rows of 128 bytes in groups of 8, swizzled by 128 bytes.
DEVICE u64 row_descriptor(u32 shared) {
    constexpr u64 kGroupBytes = 1024, kSwizzle128 = 1;
    return ((shared & 0x3FFFFu) >> 4) | (1ull << 16) | (kGroupBytes >> 4 << 32) | (kSwizzle128 << 62);
}

/// 32 bytes along K, in a descriptor's units.
constexpr u64 kDescriptorK16 = 2;

#define ACC1(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ACC2(i) ACC1(i), ACC1(i + 1)
#define ACC4(i) ACC2(i), ACC2(i + 2)
#define ACC8(i) ACC4(i), ACC4(i + 4)
#define ACC16(i) ACC8(i), ACC8(i + 8)
#define SUMS16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS32 SUMS16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS48 SUMS32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS64 SUMS48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS96 SUMS64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS128 SUMS96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS160 SUMS128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS192 SUMS160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS256 SUMS192 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/// `c (+)= a * b`: 64 weight rows from registers, kRows rows of tokens from shared memory, 16 of K. Of `c` the first kRows / 8.
template <u32 kRows>
struct Wgmma;

// Sums are operands 0 .. ROWS / 2 - 1 of the instruction; after them come a's four words, b and the predicate.
#define WGMMA(ROWS, A0, A1, A2, A3, B, ACCUMULATE, ...)                                                                \
    template <>                                                                                                       \
    struct Wgmma<ROWS> {                                                                                              \
        template <u32 kTiles>                                                                                         \
        DEVICE static void multiply(float (&c)[kTiles][4], const u32 (&a)[4], u64 b, u32 accumulate) {                \
            static_assert(kTiles * 8 >= ROWS, "a sum for every row");                                                 \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                  \
                         " wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" SUMS##ROWS "}, {%" #A0      \
                         ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"                                   \
                         : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));        \
        }                                                                                                             \
    };

WGMMA(16, 8, 9, 10, 11, 12, 13, ACC2(0))
WGMMA(32, 16, 17, 18, 19, 20, 21, ACC4(0))
WGMMA(48, 24, 25, 26, 27, 28, 29, ACC4(0), ACC2(4))
WGMMA(64, 32, 33, 34, 35, 36, 37, ACC8(0))
WGMMA(96, 48, 49, 50, 51, 52, 53, ACC8(0), ACC4(8))
WGMMA(128, 64, 65, 66, 67, 68, 69, ACC16(0))
WGMMA(160, 80, 81, 82, 83, 84, 85, ACC16(0), ACC4(16))
WGMMA(192, 96, 97, 98, 99, 100, 101, ACC16(0), ACC8(16))
WGMMA(256, 128, 129, 130, 131, 132, 133, ACC16(0), ACC16(16))

#undef WGMMA
#undef SUMS16
#undef SUMS32
#undef SUMS48
#undef SUMS64
#undef SUMS96
#undef SUMS128
#undef SUMS160
#undef SUMS192
#undef SUMS256
#undef ACC1
#undef ACC2
#undef ACC4
#undef ACC8
#undef ACC16
