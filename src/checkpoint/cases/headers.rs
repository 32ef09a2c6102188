//! Case D1: files that are cut, padded, or lie about their lengths.

use proptest::prelude::*;
use serde_json::json;

use super::super::header::{self, parse};
use super::super::testing::{Dir, SECOND, Sample, loads, refused, safetensors, with_header};
use super::super::{Checkpoint, CheckpointError, HeaderError};

fn sample() -> Sample {
    Sample::s(4, 128, 128)
}

/// Writes S in two files, lets `bend` change the second, and opens it.
#[track_caller]
fn bent(bend: impl Fn(&mut Vec<u8>), words: &[&str]) -> HeaderError {
    let dir = sample().write_two_shards();
    let mut bytes = dir.bytes(SECOND);
    bend(&mut bytes);
    dir.put(SECOND, &bytes);
    let found_bytes = bytes.len().to_string();
    let error = refused(dir.path(), words);
    let message = error.to_string();
    assert!(message.contains(SECOND), "{message:?} does not name the file");
    match error {
        CheckpointError::Header(error) => {
            let names_length =
                message.contains(&found_bytes) || message.contains(&bytes.len().saturating_sub(8).to_string());
            assert!(names_length, "{message:?} does not say how long the file is ({found_bytes})");
            error
        }
        other => panic!("another error: {other:?}"),
    }
}

#[test]
fn case_d1_truncated_by_a_byte_or_in_mid_tensor() {
    let whole = sample().write_two_shards().bytes(SECOND).len();
    let error = bent(|bytes| bytes.truncate(bytes.len() - 1), &[&whole.to_string(), "cut short"]);
    assert!(
        matches!(error, HeaderError::Truncated { expected_bytes, found_bytes, .. } if expected_bytes == found_bytes + 1)
    );
    let error = bent(|bytes| bytes.truncate(bytes.len() - 20_000), &[&whole.to_string(), "experts.3."]);
    assert!(matches!(error, HeaderError::Truncated { .. }));
}

#[test]
fn case_d1_truncated_inside_the_header() {
    let error = bent(|bytes| bytes.truncate(500), &["492", "cut short"]);
    assert!(matches!(error, HeaderError::HeaderBeyondFile { found_bytes: 492, .. }));
}

#[test]
fn case_d1_empty_and_seven_byte_files() {
    for length in [0, 7] {
        let error = bent(|bytes| bytes.truncate(length), &["8 bytes"]);
        assert!(matches!(error, HeaderError::NoPrefix { found_bytes, .. } if found_bytes == length as u64));
    }
    let error = bent(|bytes| bytes.truncate(8), &["holds 0 behind"]);
    assert!(matches!(error, HeaderError::HeaderBeyondFile { .. }));
}

#[test]
fn case_d1_a_length_prefix_of_all_ones_sizes_nothing() {
    let error = bent(|bytes| bytes[..8].fill(0xFF), &["18446744073709551615"]);
    assert!(matches!(error, HeaderError::HeaderBeyondFile { expected_bytes: u64::MAX, .. }));
}

#[test]
fn case_d1_a_long_header_in_a_longer_sparse_file_sizes_nothing() {
    let dir = Dir::new();
    let path = dir.file("sparse.safetensors");
    dir.put("sparse.safetensors", &(1_u64 << 40).to_le_bytes());
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(1 << 41).unwrap();
    let error = header::open(&path, 0).unwrap_err();
    assert!(matches!(error, HeaderError::HeaderTooLarge { found_bytes, .. } if found_bytes == 1 << 40), "{error}");
}

#[test]
fn case_d1_headers_around_100_000_bytes_load() {
    let plain = sample().write();
    let file = plain.bytes("model.safetensors");
    let header_bytes = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let (json, data) = file[8..].split_at(header_bytes);
    let reference = loads(plain.path()).0;
    for wanted in [99_993, 99_994, 100_000, 100_001] {
        let padded = std::str::from_utf8(json).unwrap().to_owned() + &" ".repeat(wanted - header_bytes);
        assert_eq!(padded.len(), wanted);
        let dir = sample().write();
        dir.put("model.safetensors", &with_header(&padded, data));
        let (checkpoint, manifest) = loads(dir.path());
        for expert in 0..4 {
            let expert = crate::ids::ExpertIdx(expert);
            let (found, wanted) = (checkpoint.read_expert(&manifest, expert), reference.read_expert(&manifest, expert));
            assert_eq!(format!("{:?}", bits(&found.unwrap())), format!("{:?}", bits(&wanted.unwrap())));
        }
    }
}

fn bits(expert: &super::super::tensors::ExpertTensors) -> Vec<(Vec<u8>, Vec<u8>, u32)> {
    use super::super::tensors::ProjectionData;
    let one = |data: &ProjectionData| match data {
        ProjectionData::Nvfp4 { packed, block_scales, global_scale, .. } => {
            (packed.to_vec(), block_scales.to_vec(), global_scale.to_bits())
        }
        other => panic!("not NVFP4: {other:?}"),
    };
    [&expert.gate, &expert.up, &expert.down].map(|projection| one(&projection.data)).to_vec()
}

#[test]
fn case_d1_a_trailing_byte() {
    let error = bent(|bytes| bytes.push(0), &["belongs to none"]);
    assert!(
        matches!(error, HeaderError::Trailing { expected_bytes, found_bytes, .. } if expected_bytes + 1 == found_bytes)
    );
}

/// Parses a header of these entries over eight bytes of data.
#[track_caller]
fn lying(entries: &[(&str, serde_json::Value)], words: &[&str]) -> HeaderError {
    let entries: Vec<_> = entries.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    let json = format!("{{{}}}", entries.join(","));
    let path = std::path::Path::new("lying.safetensors");
    let error = parse(path, json.as_bytes(), json.len() as u64 + 16, 0).unwrap_err();
    for word in words.iter().chain(&["lying.safetensors"]) {
        assert!(error.to_string().contains(word), "{error} lacks {word:?}");
    }
    error
}

fn entry(dtype: &str, shape: &[u64], begin: u64, end: u64) -> serde_json::Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})
}

#[test]
fn each_way_to_lie_has_its_own_error() {
    let whole = entry("U8", &[8], 0, 8);
    assert!(matches!(lying(&[("a", whole.clone()), ("a", whole.clone())], &["twice"]), HeaderError::Duplicate { .. }));
    let overlap = [("a", entry("U8", &[5], 0, 5)), ("b", entry("U8", &[4], 4, 8))];
    assert!(matches!(lying(&overlap, &["b", "byte 4", "inside a", "5"]), HeaderError::Overlap { .. }));
    let hole = [("a", entry("U8", &[3], 0, 3)), ("b", entry("U8", &[4], 4, 8))];
    assert!(matches!(lying(&hole, &["b", "byte 4", "expected 3", "1 bytes"]), HeaderError::Hole { .. }));
    let late = [("a", entry("U8", &[4], 4, 8))];
    assert!(matches!(lying(&late, &["4 bytes before"]), HeaderError::Hole { .. }));
    let size = [("a", entry("F32", &[3], 0, 8))];
    assert!(matches!(lying(&size, &["F32 [3]", "12 bytes", "8 bytes"]), HeaderError::Size { .. }));
    let half_byte = [("a", entry("F4", &[3], 0, 2))];
    assert!(matches!(lying(&half_byte, &["12 bits"]), HeaderError::Size { .. }));
    let huge = [("a", entry("F32", &[1 << 40, 1 << 40], 0, 8))];
    assert!(matches!(lying(&huge, &["2^64"]), HeaderError::Size { .. }));
    let reversed = [("a", entry("U8", &[8], 8, 0))];
    assert!(matches!(lying(&reversed, &["8..0"]), HeaderError::Range { .. }));
    let unknown = [("a", entry("F3", &[8], 0, 8))];
    assert!(matches!(lying(&unknown, &["`F3`"]), HeaderError::UnknownDtype { .. }));
    let beyond = [("a", entry("U8", &[9], 0, 9))];
    assert!(matches!(lying(&beyond, &["cut short", "a "]), HeaderError::Truncated { .. }));
    let short = [("a", entry("U8", &[7], 0, 7))];
    assert!(matches!(lying(&short, &["belongs to none"]), HeaderError::Trailing { .. }));
    let far = [("a", entry("U8", &[u64::MAX / 8], 0, u64::MAX / 8))];
    assert!(matches!(lying(&far, &[]), HeaderError::Truncated { .. }));
    assert!(matches!(lying(&[("a", json!(3))], &["JSON"]), HeaderError::Json { .. }));
    assert!(matches!(lying(&[("a", json!({"dtype": "U8"}))], &["JSON"]), HeaderError::Json { .. }));
    let negative = json!({"dtype": "U8", "shape": [-8], "data_offsets": [0, 8]});
    assert!(matches!(lying(&[("a", negative)], &["JSON"]), HeaderError::Json { .. }));
}

#[test]
fn empty_tensors_and_metadata_are_fine() {
    let json = json!({"__metadata__": {"format": "pt"}, "a": entry("U8", &[8], 0, 8), "b": entry("F32", &[0], 8, 8)});
    let json = json.to_string();
    let entries = parse(std::path::Path::new("x"), json.as_bytes(), json.len() as u64 + 16, 0).unwrap();
    assert_eq!(entries.iter().map(|entry| &*entry.name).collect::<Vec<_>>(), ["a", "b"]);
    let begin = json.len() as u64 + 8;
    assert_eq!((entries[0].begin, entries[0].end), (begin, begin + 8));
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let dir = Dir::new();
    std::fs::create_dir(dir.file("model.safetensors")).unwrap();
    assert!(matches!(header::open(&dir.file("model.safetensors"), 0), Err(HeaderError::NotAFile { .. })));
    assert!(matches!(header::open(&dir.file("none"), 0), Err(HeaderError::Open { .. })));
}

#[test]
fn a_file_cut_after_opening_is_an_error_and_no_signal() {
    let dir = sample().write();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let manifest = checkpoint.layer(crate::ids::LayerIdx(0)).unwrap();
    let file = std::fs::File::options().write(true).open(dir.file("model.safetensors")).unwrap();
    file.set_len(10_000).unwrap();
    let error = checkpoint.read_expert(&manifest, crate::ids::ExpertIdx(3)).unwrap_err();
    assert!(matches!(error, CheckpointError::Shrank { found_bytes: 10_000, .. }), "{error}");
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let dir = Dir::new();
        dir.put("x", &bytes);
        let _ = header::open(&dir.file("x"), 0);
    }

    #[test]
    fn random_headers_never_panic(json in "[\\[\\]{}\":,0-9a-z _]{0,200}", extra in 0_u64..100) {
        let _ = parse(std::path::Path::new("x"), json.as_bytes(), 8 + json.len() as u64 + extra, 0);
    }

    /// What the checks accept, the format's own library accepts, and the ranges are the same.
    #[test]
    fn accepted_files_are_accepted_by_the_formats_own_library(
        entries in proptest::collection::vec((0_u64..4, 0_u64..4, 0_u64..20, 0_u64..20, 0_usize..4), 0..4),
        num_data in 0_usize..24,
    ) {
        let dtypes = ["U8", "BF16", "F32", "F4"];
        let tensors: Vec<_> = entries.iter().enumerate()
            .map(|(at, &(rows, columns, begin, length, dtype))| (format!("t{at}"), entry(dtypes[dtype], &[rows, columns], begin, begin + length)))
            .collect();
        let json = serde_json::Value::Object(tensors.into_iter().collect()).to_string();
        let bytes = with_header(&json, &vec![0; num_data]);
        let ours = parse(std::path::Path::new("x"), json.as_bytes(), bytes.len() as u64, 0);
        match (ours, safetensors::SafeTensors::deserialize(&bytes)) {
            (Ok(entries), Ok(theirs)) => {
                for entry in entries {
                    let theirs = theirs.tensor(&entry.name).unwrap();
                    prop_assert_eq!(theirs.data().len() as u64, entry.num_bytes());
                }
            }
            (Ok(_), Err(error)) => prop_assert!(false, "only we accept it: {error:?} {json}"),
            (Err(error), Ok(_)) => prop_assert!(false, "only they accept it: {error} {json}"),
            (Err(_), Err(_)) => {}
        }
    }

    /// A file of random tensors is read back as it was written; any one byte less or more is refused.
    #[test]
    fn whole_files_are_read_and_others_refused(sizes in proptest::collection::vec(1_usize..50, 1..6)) {
        let tensors: std::collections::BTreeMap<_, _> = sizes.iter().enumerate()
            .map(|(at, &n)| (format!("t{at}"), super::super::testing::Tensor::new("U8", &[n], vec![0; n])))
            .collect();
        let bytes = safetensors(&tensors);
        let dir = Dir::new();
        dir.put("x", &bytes);
        prop_assert_eq!(header::open(&dir.file("x"), 0).unwrap().1.len(), sizes.len());
        dir.put("x", &bytes[..bytes.len() - 1]);
        prop_assert!(header::open(&dir.file("x"), 0).is_err());
        dir.put("x", &[&bytes[..], &[0]].concat());
        prop_assert!(header::open(&dir.file("x"), 0).is_err());
    }
}
