//! Files of inputs, expected values and router choices.

use std::path::{Path, PathBuf};

use super::super::testing::{Dir, Tensor, safetensors};
use super::super::{CheckpointError, MatrixDtype, read_activations, read_topk};
use crate::ids::LayerIdx;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/expected").join(name)
}

fn file(tensors: &[(&str, Tensor)]) -> (Dir, PathBuf) {
    let dir = Dir::new();
    let owned: Vec<_> = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
    dir.put("file.safetensors", &safetensors(owned.iter().map(|(name, tensor)| (name, tensor))));
    let path = dir.file("file.safetensors");
    (dir, path)
}

fn message<T>(result: Result<T, CheckpointError>) -> String {
    result.err().expect("should be refused").to_string()
}

fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn inputs_of_the_fixtures_are_bf16_and_expected_values_f32() {
    let path = fixture("modelopt-dsv3-tiny.layer1.safetensors");
    let x = read_activations(&path, Some("x")).unwrap();
    assert_eq!((x.num_rows, x.num_columns, x.dtype, x.values.len()), (37, 256, MatrixDtype::Bf16, 37 * 256));
    let y = read_activations(&path, Some("routed.w4a16.swiglu")).unwrap();
    assert_eq!((y.num_rows, y.num_columns, y.dtype), (37, 256, MatrixDtype::F32));
    // The same file through the format's own library.
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let raw = file.tensor("routed.w4a16.swiglu").unwrap().data();
    let wanted: Vec<_> = raw.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(y.values, wanted);
    let text = message(read_activations(&path, None));
    assert!(text.contains("several") && text.contains("routed.w4a4.situ (F32 [37, 256])"), "{text}");
    let text = message(read_activations(&path, Some("y")));
    assert!(text.contains("no tensor y") && text.contains("x (BF16"), "{text}");
    let text = message(read_activations(&path, Some("topk_idx")));
    assert!(text.contains("topk_idx") && text.contains("I32 [37, 4]") && text.contains("BF16 or F32"), "{text}");
}

#[test]
fn a_file_of_one_matrix_needs_no_name() {
    let (_dir, path) = file(&[
        ("hidden", Tensor::bf16(&[2, 3], 1.5)),
        ("ids", Tensor::new("I32", &[2, 2], ints(&[0; 4]))),
        ("bias", Tensor::bf16(&[3], 0.0)),
    ]);
    let matrix = read_activations(&path, None).unwrap();
    assert_eq!((matrix.tensor.as_str(), matrix.values), ("hidden", vec![1.5; 6]));
    let (_dir, path) = file(&[("bias", Tensor::bf16(&[3], 0.0))]);
    assert!(message(read_activations(&path, None)).contains("no tensor is a BF16 or F32 matrix"));
    let (_dir, path) = file(&[("hidden", Tensor::bf16(&[0, 3], 0.0))]);
    assert_eq!(read_activations(&path, None).unwrap().num_rows, 0);
}

#[test]
fn router_choices_of_both_widths_and_places() {
    let idx32 = Tensor::new("I32", &[2, 2], ints(&[3, -1, 0, 1]));
    let idx64 = Tensor::new("I64", &[2, 2], [3_i64, -1, 0, 1].iter().flat_map(|v| v.to_le_bytes()).collect());
    let weights = Tensor::new("F32", &[2, 2], floats(&[0.5, 0.5, 0.75, 0.25]));
    for idx in [&idx32, &idx64] {
        let (_dir, path) = file(&[("topk_idx", idx.clone()), ("topk_weights", weights.clone())]);
        for layer in [None, Some(LayerIdx(3))] {
            let topk = read_topk(&path, layer).unwrap();
            assert_eq!((topk.num_topk, topk.idx, topk.weights), (2, vec![3, -1, 0, 1], vec![0.5, 0.5, 0.75, 0.25]));
        }
        let (_dir, path) = file(&[("layers.3.topk_idx", idx.clone()), ("layers.3.topk_weights", weights.clone())]);
        assert_eq!(read_topk(&path, Some(LayerIdx(3))).unwrap().idx, [3, -1, 0, 1]);
        let text = message(read_topk(&path, Some(LayerIdx(4))));
        assert!(text.contains("layers.4.topk_idx") && text.contains("layers.3.topk_idx"), "{text}");
    }
    let topk = read_topk(&fixture("modelopt-qwen3-tiny.layer0.safetensors"), Some(LayerIdx(0))).unwrap();
    assert_eq!((topk.num_topk, topk.idx.len()), (2, 74));
}

#[test]
fn unusable_router_choices_are_refused_where_they_are() {
    let good = Tensor::new("F32", &[2, 2], floats(&[0.5; 4]));
    let wide = [0_i64, 1, 2, 1 << 40].iter().flat_map(|v| v.to_le_bytes()).collect();
    let (_dir, path) = file(&[("topk_idx", Tensor::new("I64", &[2, 2], wide)), ("topk_weights", good.clone())]);
    let text = message(read_topk(&path, None));
    assert!(text.contains("token 1, slot 1") && text.contains("1099511627776"), "{text}");
    let idx = Tensor::new("I32", &[2, 2], ints(&[0; 4]));
    let nan = Tensor::new("F32", &[2, 2], floats(&[0.5, 0.5, f32::NAN, 0.5]));
    let (_dir, path) = file(&[("topk_idx", idx.clone()), ("topk_weights", nan)]);
    let text = message(read_topk(&path, None));
    assert!(text.contains("topk_weights") && text.contains("token 1, slot 0") && text.contains("NaN"), "{text}");
    for weights in [Tensor::new("F32", &[4], floats(&[0.5; 4])), Tensor::bf16(&[2, 2], 0.5)] {
        let (_dir, path) = file(&[("topk_idx", idx.clone()), ("topk_weights", weights)]);
        let text = message(read_topk(&path, None));
        assert!(text.contains("topk_weights") && text.contains("F32 [2, 2]"), "{text}");
    }
    let (_dir, path) = file(&[("topk_idx", Tensor::bf16(&[2, 2], 0.0)), ("topk_weights", good)]);
    assert!(message(read_topk(&path, None)).contains("I32 or I64"));
}
