//! `kernels/nvfp4.cuh` against the reference, bit for bit, on the host: the header is plain arithmetic, so that a C++ compiler
//! can build it once the device's intrinsics are defined. What this can't show is how a GPU's compiler treats it.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use lockstep::numerics::nvfp4::{BLOCK, quantise_row};

/// Reads a scale and blocks of 16 floats, and writes for each block its 8 bytes of codes, its scale, and two flags.
const PROGRAM: &str = r#"
#include <cmath>
#include <cstdio>
#include <cstring>
#define __device__
#define __forceinline__ inline
static unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
#include "nvfp4.cuh"
int main() {
    float input_scale, x[16];
    if (std::fread(&input_scale, 4, 1, stdin) != 1) return 1;
    const float inverse_scale = __fdiv_rn(1.0f, input_scale);
    while (std::fread(x, 4, 16, stdin) == 16) {
        unsigned amax = 0;
        for (float v : x) amax = nvfp4::magnitude_bits(v) > amax ? nvfp4::magnitude_bits(v) : amax;
        const nvfp4::BlockScale scale = nvfp4::block_scale(amax, inverse_scale);
        const unsigned codes[2] = {nvfp4::pack_eight(x, scale.factor), nvfp4::pack_eight(x + 8, scale.factor)};
        const unsigned char rest[3] = {(unsigned char)scale.bits, scale.saturated, scale.zeroed};
        std::fwrite(codes, 1, 8, stdout);
        std::fwrite(rest, 1, 3, stdout);
    }
}
"#;

/// Bits that visit every exponent, ties of both formats, subnormals, infinities and NaN.
fn values(count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [_, _, a, b, c, d, _, _] = state.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    };
    let ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 464.0, 0.0, -0.0, f32::INFINITY, f32::MIN_POSITIVE];
    (0..count)
        .map(|idx| {
            let bits = next();
            match (idx / BLOCK) % 5 {
                // Values of one magnitude, as activations are.
                0 => f32::from_bits((bits & 0x80ff_ffff) | 0x3f00_0000),
                // Ties times powers of two.
                1 => ties[bits as usize % ties.len()] * f32::from_bits(((bits >> 8) % 40 + 107) << 23),
                // Beside what a division by six makes a tie of e4m3, where a product with a sixth rounds another way.
                2 => {
                    let tie = 6.0 * (1.0 + f32::from(2 * (bits.to_le_bytes()[0] % 8) + 1) / 16.0);
                    f32::from_bits((tie.to_bits() + (bits >> 8) % 7 - 3) + (((bits >> 16) % 8) << 23))
                }
                // Anything, NaN included.
                3 => f32::from_bits(bits),
                // bf16 values around 1.
                _ => f32::from_bits((bits & 0x83ff_0000) | 0x3c00_0000),
            }
        })
        .collect()
}

#[test]
fn codes_scales_and_counts_are_the_references() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (source, program) = (dir.path().join("main.cpp"), dir.path().join("main"));
    fs::write(&source, PROGRAM).expect("written");
    let mut compile = Command::new("c++");
    compile
        .args(["-std=c++17", "-O2", "-ffp-contract=off", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"));
    match compile.arg(&source).arg("-o").arg(&program).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("skipped: there is no C++ compiler ({error})");
            return;
        }
    }
    let values = values(2_500_000 / BLOCK * BLOCK);
    for input_scale in [1.0_f32, 0.003_7, 1.0 / 8192.0, 37.5] {
        let mut input = input_scale.to_le_bytes().to_vec();
        values.iter().for_each(|value| input.extend(value.to_le_bytes()));
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        let mut stdin = child.stdin.take().expect("a pipe");
        let writer = std::thread::spawn(move || stdin.write_all(&input).expect("all is read"));
        let output = child.wait_with_output().expect("it ends");
        writer.join().expect("the writer ends");
        assert_eq!(output.stdout.len(), values.len() / BLOCK * 11);
        for (idx, (block, found)) in values.chunks_exact(BLOCK).zip(output.stdout.chunks_exact(11)).enumerate() {
            let (mut packed, mut scale) = ([0; BLOCK / 2], [0]);
            let counts = quantise_row(block, input_scale, &mut packed, &mut scale);
            let flags = [counts.num_saturated, counts.num_zeroed].map(|count| u8::from(count > 0));
            let wanted = [&packed[..], &scale, &flags].concat();
            assert_eq!(found, wanted, "block {idx} of scale {input_scale}: {block:?}");
        }
    }
}
