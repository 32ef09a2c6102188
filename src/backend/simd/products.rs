//! The loops over k, written once for every instruction set.
//!
//! A module that calls [`product_kernels`] provides sixteen lanes as `F` and `splat`, `load`, `store`, `fma`, `decoder`,
//! `nvfp4_scale`, `nvfp4_pair`, `bf16_pair`, `fetch`, and `PEAK_CHAINS`.

/// Repeats a block for every second k of a block of sixteen, with `$k` a constant: shifts and indices then fold.
macro_rules! each_pair {
    ($k:ident => $body:block) => {
        each_pair!(@ $k $body 0 2 4 6 8 10 12 14)
    };
    (@ $k:ident $body:block $($value:literal)*) => {
        $({
            const $k: usize = $value;
            $body
        })*
    };
}
pub(super) use each_pair;

/// Adds the products of one block of sixteen k to sums in registers.
macro_rules! multiply_block {
    ($p:ident, $r:ident, $x:ident, $weights:ident, $sums:ident) => {
        each_pair!(K => {
            for i in 0..2 {
                let mut w = [splat(0.0); $p];
                for p in 0..$p {
                    w[p] = load(&$weights[p][K + i]);
                }
                for r in 0..$r {
                    let x = splat($x[r].0[K + i]);
                    for p in 0..$p {
                        $sums[p][r] = fma(x, w[p], $sums[p][r]);
                    }
                }
            }
        })
    };
}
pub(super) use multiply_block;

/// The products of [`super::kernels::Kernels`] as free functions with the given attribute.
///
/// `fused` lists how many rows are multiplied from registers, and by how many panels at a time: as many as keep the
/// sums in registers. `tile` is the panels and rows of a register tile, and the smaller tiles that finish a unit.
macro_rules! product_kernels {
    (
        $(#[$attribute:meta])?
        fused: $($fused_rows:literal x $fused_panels:literal),*;
        tile: $tile_panels:literal x $($tile_rows:literal)*, at most $max_tile_rows:literal
    ) => {
        fn fuses(num_rows: usize) -> bool {
            const FUSED: &[usize] = &[$($fused_rows),*];
            FUSED.contains(&num_rows)
        }

        $(#[$attribute])?
        fn fused(panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            match rows.num_rows() {
                $($fused_rows => fused_groups::<$fused_panels, $fused_rows>(panels, rows, acc),)*
                num_rows => unreachable!("{num_rows} rows are not fused"),
            }
        }

        $(#[$attribute])?
        fn fused_groups<const P: usize, const R: usize>(panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            for (panels, acc) in panels.chunks(P).zip(acc.chunks_mut(P * R)) {
                if panels.len() == P {
                    fused_group::<P, R>(panels, rows, acc);
                    continue;
                }
                for (panel, acc) in panels.chunks(1).zip(acc.chunks_mut(R)) {
                    fused_group::<1, R>(panel, rows, acc);
                }
            }
        }

        $(#[$attribute])?
        fn fused_group<const P: usize, const R: usize>(panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            match panels[0] {
                Panel::Nvfp4 { .. } => fused_nvfp4::<P, R>(panels, rows, acc),
                Panel::Bf16(_) => fused_bf16::<P, R>(panels, rows, acc),
                Panel::F32(_) => unreachable!("f32 weights are never decoded"),
            }
        }

        #[inline(never)]
        $(#[$attribute])?
        fn fused_nvfp4<const P: usize, const R: usize>(panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            let views: [_; P] = std::array::from_fn(|p| match panels[p] {
                Panel::Nvfp4 { codes, scales } => (codes, scales),
                Panel::Bf16(_) | Panel::F32(_) => unreachable!("one format a call"),
            });
            let decoder = decoder();
            let mut sums = [[splat(0.0); R]; P];
            for block in 0..rows.num_blocks() {
                let x = rows.tile::<R>(block, 0);
                let codes: [_; P] = std::array::from_fn(|p| &views[p].0[block]);
                let mut block_sums = [[splat(0.0); R]; P];
                for p in 0..P {
                    fetch(codes[p]);
                }
                each_pair!(K => {
                    for p in 0..P {
                        let pair = nvfp4_pair(decoder, codes[p], K);
                        for i in 0..2 {
                            for r in 0..R {
                                block_sums[p][r] = fma(splat(x[r].0[K + i]), pair[i], block_sums[p][r]);
                            }
                        }
                    }
                });
                for p in 0..P {
                    let scale = nvfp4_scale(&views[p].1[block]);
                    for r in 0..R {
                        sums[p][r] = fma(block_sums[p][r], scale, sums[p][r]);
                    }
                }
            }
            // NOTE: an iterator over the sums would put them into memory all along.
            for p in 0..P {
                for r in 0..R {
                    store(&mut acc[p * R + r], sums[p][r]);
                }
            }
        }

        #[inline(never)]
        $(#[$attribute])?
        fn fused_bf16<const P: usize, const R: usize>(panels: &[Panel<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            let views: [_; P] = std::array::from_fn(|p| match panels[p] {
                Panel::Bf16(blocks) => blocks,
                Panel::Nvfp4 { .. } | Panel::F32(_) => unreachable!("one format a call"),
            });
            let decoder = decoder();
            let mut sums = [[splat(0.0); R]; P];
            for block in 0..rows.num_blocks() {
                let x = rows.tile::<R>(block, 0);
                let pairs: [_; P] = std::array::from_fn(|p| &views[p][block]);
                each_pair!(K => {
                    for p in 0..P {
                        let pair = bf16_pair(decoder, &pairs[p][K / 2]);
                        for i in 0..2 {
                            for r in 0..R {
                                sums[p][r] = fma(splat(x[r].0[K + i]), pair[i], sums[p][r]);
                            }
                        }
                    }
                });
            }
            // NOTE: an iterator over the sums would put them into memory all along.
            for p in 0..P {
                for r in 0..R {
                    store(&mut acc[p * R + r], sums[p][r]);
                }
            }
        }

        $(#[$attribute])?
        fn decode(panel: Panel<'_>, values: &mut [Lane], scales: &mut [Lane]) {
            let decoder = decoder();
            let values = values.as_chunks_mut::<LANES>().0;
            match panel {
                Panel::Nvfp4 { codes, scales: bits } => {
                    for ((codes, bits), (values, scale)) in codes.iter().zip(bits).zip(values.iter_mut().zip(scales)) {
                        store(scale, nvfp4_scale(bits));
                        each_pair!(K => {
                            let pair = nvfp4_pair(decoder, codes, K);
                            store(&mut values[K], pair[0]);
                            store(&mut values[K + 1], pair[1]);
                        });
                    }
                }
                Panel::Bf16(blocks) => {
                    for (pairs, values) in blocks.iter().zip(values) {
                        for (pair, values) in pairs.iter().zip(values.as_chunks_mut::<2>().0) {
                            let pair = bf16_pair(decoder, pair);
                            store(&mut values[0], pair[0]);
                            store(&mut values[1], pair[1]);
                        }
                    }
                }
                Panel::F32(_) => unreachable!("f32 weights are never decoded"),
            }
        }

        $(#[$attribute])?
        fn multiply(panels: &[Decoded<'_>], rows: RowBlocks<'_>, acc: &mut [Lane]) {
            let num_rows = rows.num_rows();
            // Tiles of even height: a last one of one or two rows would have too few sums to hide an fma's latency.
            let num_tiles = num_rows.div_ceil($max_tile_rows);
            for (panels, acc) in panels.chunks($tile_panels).zip(acc.chunks_mut($tile_panels * num_rows)) {
                for tile in 0..num_tiles {
                    let first_row = num_rows * tile / num_tiles;
                    let tile_rows = num_rows * (tile + 1) / num_tiles - first_row;
                    match (panels.len(), tile_rows) {
                        $(($tile_panels, $tile_rows) => {
                            multiply_tile::<$tile_panels, $tile_rows>(panels, rows, first_row, acc);
                        })*
                        $((_, $tile_rows) => multiply_tile::<1, $tile_rows>(panels, rows, first_row, acc),)*
                        _ => unreachable!("a tile of {tile_rows} rows"),
                    }
                }
            }
        }

        $(#[$attribute])?
        fn multiply_tile<const P: usize, const R: usize>(
            panels: &[Decoded<'_>],
            rows: RowBlocks<'_>,
            first_row: usize,
            acc: &mut [Lane],
        ) {
            let mut acc_rows = acc.chunks_exact_mut(rows.num_rows());
            let acc: [&mut [Lane; R]; P] = std::array::from_fn(|_| {
                acc_rows.next().and_then(|rows| rows[first_row..].first_chunk_mut()).expect("P panels of R rows")
            });
            match panels[0].scales {
                Some(_) => multiply_scaled::<P, R>(panels, rows, first_row, acc),
                None => multiply_plain::<P, R>(panels, rows, first_row, acc),
            }
        }

        /// One chain over all k, in registers.
        #[inline(never)]
        $(#[$attribute])?
        fn multiply_plain<const P: usize, const R: usize>(
            panels: &[Decoded<'_>],
            rows: RowBlocks<'_>,
            first_row: usize,
            acc: [&mut [Lane; R]; P],
        ) {
            let weights: [&[[Lane; LANES]]; P] = std::array::from_fn(|p| panels[p].values.as_chunks().0);
            let mut sums = [[splat(0.0); R]; P];
            for p in 0..P {
                for r in 0..R {
                    sums[p][r] = load(&acc[p][r]);
                }
            }
            for block in 0..rows.num_blocks() {
                let x = rows.tile::<R>(block, first_row);
                let weights: [_; P] = std::array::from_fn(|p| &weights[p][block]);
                multiply_block!(P, R, x, weights, sums);
            }
            for p in 0..P {
                for r in 0..R {
                    store(&mut acc[p][r], sums[p][r]);
                }
            }
        }

        /// One chain a block, in registers; the sums over blocks stay in the first-level cache.
        #[inline(never)]
        $(#[$attribute])?
        fn multiply_scaled<const P: usize, const R: usize>(
            panels: &[Decoded<'_>],
            rows: RowBlocks<'_>,
            first_row: usize,
            acc: [&mut [Lane; R]; P],
        ) {
            let weights: [&[[Lane; LANES]]; P] = std::array::from_fn(|p| panels[p].values.as_chunks().0);
            let scales: [&[Lane]; P] = std::array::from_fn(|p| panels[p].scales.expect("panels of one format"));
            for block in 0..rows.num_blocks() {
                let x = rows.tile::<R>(block, first_row);
                let weights: [_; P] = std::array::from_fn(|p| &weights[p][block]);
                let mut sums = [[splat(0.0); R]; P];
                multiply_block!(P, R, x, weights, sums);
                for p in 0..P {
                    let scale = load(&scales[p][block]);
                    for r in 0..R {
                        let sum = fma(sums[p][r], scale, load(&acc[p][r]));
                        store(&mut acc[p][r], sum);
                    }
                }
            }
        }

        $(#[$attribute])?
        fn quantise(input_scale: f32, values: &[Lane], out: &mut [Lane]) -> QuantCounts {
            nvfp4::quantise_unscaled(bytemuck::cast_slice(values), input_scale, bytemuck::cast_slice_mut(out))
        }

        $(#[$attribute])?
        fn fma_peak(rounds: u64) -> (u64, f32) {
            const UNROLL: usize = 8;
            let factor = splat(std::hint::black_box(0.999_999));
            let term = splat(std::hint::black_box(1e-7));
            let mut sums = [splat(1.0); PEAK_CHAINS];
            for _ in 0..rounds {
                for _ in 0..UNROLL {
                    for sum in &mut sums {
                        *sum = fma(*sum, factor, term);
                    }
                }
            }
            let mut lane = Lane::default();
            let mut total = 0.0;
            for sum in sums {
                store(&mut lane, sum);
                total += lane.0.iter().sum::<f32>();
            }
            (rounds * (UNROLL * PEAK_CHAINS * LANES * 2) as u64, total)
        }
    };
}
pub(super) use product_kernels;
