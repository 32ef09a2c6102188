//! The bytes, and what is done with those of others.

use proptest::prelude::*;

use super::super::*;
use super::inputs;

#[test]
fn the_encoding_is_what_it_says() {
    let mut fields = Fields::new(Kind::Selection);
    fields.add("b", Value::set(["y", "x"]));
    fields.add("a", 1.0f32);
    let fingerprint = fields.finish().unwrap();
    let mut wanted = b"lockstep\x01\0\x01\x02\0\0\0".to_vec();
    wanted.extend(b"\x01\0\0\0a\x03\0\0\x80\x3f");
    wanted.extend(b"\x01\0\0\0b\x07\x02\0\0\0\x01\0\0\0x\x01\0\0\0y");
    assert_eq!(fingerprint.encode(), wanted);
    assert_eq!(fingerprint.digest(), Digest::of(&wanted));
    assert_eq!(fingerprint.listing(), "a: 1.0 (bits 0x3f800000)\nb: {x, y}\n");
}

#[test]
fn one_path_has_one_value() {
    let mut fields = Fields::new(Kind::Session);
    fields.add("a", 1u64);
    fields.add("a", 1u64);
    assert!(fields.clone().finish().is_ok());
    fields.add("a", 2u64);
    assert_eq!(
        fields.finish().unwrap_err().to_string(),
        "the fingerprint was fed a twice, with 1 and with 2; give each value a path of its own"
    );
}

#[test]
fn bytes_that_are_no_fingerprint_are_refused_by_their_fault() {
    let good = inputs().session().encode();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Fingerprint::decode(&bytes).unwrap_err()
    };
    assert_eq!(with(0, b'L'), DecodeError::Magic);
    assert_eq!(with(8, 2), DecodeError::Version { found: 2 });
    assert!(with(8, 2).to_string().contains("start every rank from the same build"));
    assert!(matches!(with(10, 9), DecodeError::Malformed { at: 10, .. }));
    // A count that would make a careless reader allocate 4 GiB.
    assert!(matches!(with(14, 0xff), DecodeError::Truncated { at: 15, .. }));
    let mut longer = good.clone();
    longer.push(0);
    assert_eq!(Fingerprint::decode(&longer), Err(DecodeError::Trailing { at: good.len(), len: good.len() + 1 }));
    assert_eq!(Fingerprint::decode(&[]), Err(DecodeError::Magic));
}

fn any_value() -> impl Strategy<Value = Value> {
    let text = "\\PC{0,12}";
    prop_oneof![
        Just(Value::Absent),
        any::<bool>().prop_map(Value::Flag),
        any::<u64>().prop_map(Value::Number),
        any::<u32>().prop_map(Value::F32),
        any::<u64>().prop_map(Value::F64),
        text.prop_map(Value::Text),
        any::<[u8; 32]>().prop_map(|bytes| Value::Digest(Digest(bytes))),
        prop::collection::btree_set(text, 0..4).prop_map(Value::Set),
        prop::collection::vec(text, 0..4).prop_map(Value::List),
    ]
}

fn any_fingerprint() -> impl Strategy<Value = Fingerprint> {
    prop::collection::btree_map("[a-z.0-9]{0,10}", any_value(), 0..12)
        .prop_map(|map| Fingerprint::new(Kind::Session, map))
}

proptest! {
    #[test]
    fn bytes_read_back(fingerprint in any_fingerprint()) {
        let bytes = fingerprint.encode();
        prop_assert_eq!(Fingerprint::decode(&bytes).unwrap(), fingerprint);
        for len in 0..bytes.len() {
            prop_assert!(Fingerprint::decode(&bytes[..len]).is_err(), "cut to {} of {}", len, bytes.len());
        }
    }

    /// What is accepted is what this version writes: damage is refused, or gives another value and so another digest.
    #[test]
    fn damage_is_refused_or_seen(fingerprint in any_fingerprint(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = fingerprint.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(damaged) = Fingerprint::decode(&bytes) {
            prop_assert_eq!(damaged.encode(), bytes);
            prop_assert_ne!(damaged.digest(), fingerprint.digest());
        }
    }
}
