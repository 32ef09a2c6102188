//! Safetensors files written and read by hand, so that a header can say what is not so and the product's own reader does
//! not judge itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::tensor::{Dtype, Tensor};

/// Named tensors of one file, in order of name.
pub type Tensors = BTreeMap<String, Tensor>;

/// The bytes of a file; the header's length is a multiple of 8.
pub fn encode(tensors: &Tensors) -> Vec<u8> {
    encode_with(tensors, |_| {}, None)
}

/// The bytes of a file whose header was edited and padded with spaces to `header_len` bytes.
pub fn encode_with(
    tensors: &Tensors,
    edit_header: impl FnOnce(&mut Map<String, Value>),
    header_len: Option<usize>,
) -> Vec<u8> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, tensor) in tensors {
        let start = end;
        end += tensor.bytes.len();
        let entry = json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    edit_header(&mut header);
    let mut text = Value::Object(header).to_string().into_bytes();
    let padded = header_len.unwrap_or(text.len().next_multiple_of(8));
    assert!(text.len() <= padded, "the header needs {} bytes, more than {padded}", text.len());
    text.resize(padded, b' ');

    let mut bytes = (padded as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&text);
    for tensor in tensors.values() {
        bytes.extend_from_slice(&tensor.bytes);
    }
    bytes
}

pub fn write(path: &Path, tensors: &Tensors) {
    write_bytes(path, &encode(tensors));
}

/// Writes any file of a test, and names it where that fails.
pub fn write_bytes(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

/// Reads a file, checking that its tensors tile the data exactly.
pub fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    decode(&bytes).unwrap_or_else(|problem| panic!("{}: {problem}", path.display()))
}

fn decode(bytes: &[u8]) -> Result<Tensors, String> {
    let prefix: [u8; 8] = bytes.get(..8).ok_or("shorter than 8 bytes")?.try_into().expect("eight bytes");
    let header_len = usize::try_from(u64::from_le_bytes(prefix)).map_err(|_| "header length")?;
    let text = bytes.get(8..8 + header_len).ok_or("the header passes the end")?;
    let data = &bytes[8 + header_len..];
    let header: Map<String, Value> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let mut tensors = Tensors::new();
    let mut ranges = Vec::new();
    for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let dtype = Dtype::ALL.into_iter().find(|dtype| entry["dtype"] == dtype.name());
        let dtype = dtype.ok_or(format!("{name}: unknown dtype {}", entry["dtype"]))?;
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).map_err(|e| format!("{name}: {e}"))?;
        let [start, end]: [usize; 2] =
            serde_json::from_value(entry["data_offsets"].clone()).map_err(|e| format!("{name}: {e}"))?;
        let bytes = data.get(start..end).ok_or(format!("{name}: {start}..{end} is outside the data"))?;
        if bytes.len() != shape.iter().product::<usize>() * dtype.num_bytes() {
            return Err(format!("{name}: {} bytes for {dtype:?} {shape:?}", bytes.len()));
        }
        ranges.push((start, end));
        tensors.insert(name, Tensor { dtype, shape, bytes: bytes.to_vec() });
    }
    ranges.sort_unstable();
    let mut covered = 0;
    for (start, end) in ranges {
        if start != covered {
            return Err(format!("data {covered}..{start} belongs to no tensor, or to two"));
        }
        covered = end;
    }
    if covered == data.len() {
        Ok(tensors)
    } else {
        Err(format!("{} bytes after the last tensor", data.len() - covered))
    }
}

/// SHA-256 of a file.
pub fn sha256(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Tensors {
        [("b".to_string(), Tensor::f32(&[2], &[1.0, -2.0])), ("a".into(), Tensor::u8(&[1, 3], vec![7, 8, 9]))].into()
    }

    #[test]
    fn what_is_written_is_read_back() {
        assert_eq!(decode(&encode(&two())).expect("a good file"), two());
        let padded = encode_with(&two(), |_| {}, Some(1001));
        assert_eq!(u64::from_le_bytes(padded[..8].try_into().expect("eight")), 1001);
        assert_eq!(decode(&padded).expect("a good file"), two());
    }

    #[test]
    fn the_products_reader_accepts_what_is_written() {
        let bytes = encode(&two());
        let parsed = ::safetensors::SafeTensors::deserialize(&bytes).expect("a good file");
        assert_eq!(parsed.tensor("b").expect("b").data(), two()["b"].bytes);
    }

    #[test]
    fn lies_are_written_and_noticed() {
        let lie = encode_with(&two(), |header| header["b"]["shape"] = json!([3]), None);
        assert!(decode(&lie).expect_err("a lie").contains("b: 8 bytes"));
        let mut long = encode(&two());
        long.push(0);
        assert!(decode(&long).expect_err("a trailing byte").contains("1 bytes after"));
        let overlap = encode_with(&two(), |header| header["b"]["data_offsets"] = json!([2, 10]), None);
        assert!(decode(&overlap).expect_err("an overlap").contains("or to two"));
    }

    #[test]
    fn the_projects_fixtures_read() {
        let expected = super::super::fixtures::expected("modelopt-dsv3-tiny.layer1");
        assert_eq!(read(&expected)["x"].shape, [37, 256]);
    }

    #[test]
    fn sha256_is_sha256() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), "abc").expect("written");
        assert_eq!(sha256(file.path()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
