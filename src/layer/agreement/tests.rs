//! The comparison that runs over MPI, over worlds of 256 ranks in this process: what it says and what it moves.

use super::*;
use crate::exit::Known;
use crate::select::fingerprint::{BuildFacts, StartBuilder};
use crate::world::Traffic;
use crate::world::simulated::simulate;

const NUM_RANKS: u64 = 256;
const TOPIC: Topic = Topic { about: "what they were asked for", cure: "Give every rank the same." };

type Local = Result<Fingerprint, FingerprintError>;

/// What a rank was asked for, in fields of a deployment's names.
fn start(fields: &[(&str, &str)]) -> Local {
    let mut builder = StartBuilder::new(BuildFacts { version: "1", revision: "a", target: "t", profile: "release" });
    fields.iter().for_each(|(path, value)| _ = builder.key(path, value));
    builder.finish()
}

fn alike() -> Local {
    start(&[("dispatch.chunk_tokens", "64"), ("moe.backend", "auto")])
}

fn failed(second: &str) -> Local {
    start(&[("moe.backend", "auto"), ("moe.backend", second)])
}

/// How a world ended.
struct Ended {
    message: String,
    traffic: Vec<Traffic>,
}

/// Ranks that don't go on: all of them alike, and one with a message.
fn refused(of_rank: impl Fn(usize) -> Local + Sync) -> Ended {
    let ended = simulate(256, |ranks| agree_on(ranks, TOPIC, of_rank(ranks.rank().index())));
    let mut messages = Vec::new();
    let mut traffic = Vec::new();
    for (outcome, moved) in ended {
        let refusal = outcome.expect_err("no rank goes on");
        if refusal.known() == (Known::Everywhere { speaks: true }) {
            messages.push(format!("exit {}: {refusal}", refusal.exit().code()));
        }
        traffic.push(moved);
    }
    assert_eq!(messages.len(), 1, "one rank speaks: {messages:?}");
    Ended { message: messages.swap_remove(0), traffic }
}

/// What the model says of a comparison in which rank 0 and `others` brought these distinct encodings.
fn predicted(rank: usize, distinct: &[(usize, Local)]) -> Traffic {
    let lengths: Vec<u64> =
        distinct.iter().map(|(_, local)| local.as_ref().expect("encoded").encode().len() as u64).collect();
    Traffic::of_differing(NUM_RANKS, &lengths, distinct.iter().position(|(root, _)| *root == rank))
}

#[test]
fn equal_ranks_go_on_after_one_exchange_of_48_bytes() {
    let wanted = alike().expect("fields");
    for (outcome, traffic) in simulate(256, |ranks| agree_on(ranks, TOPIC, alike())) {
        assert_eq!(outcome.expect("alike"), wanted);
        assert_eq!(traffic, Traffic::of_alike(NUM_RANKS));
        assert_eq!((traffic.collectives, traffic.brought_bytes, traffic.received_bytes), (1, 48, 255 * 48));
    }
}

#[test]
fn one_rank_that_differs_is_named_and_two_encodings_travel() {
    let other = || start(&[("dispatch.chunk_tokens", "128"), ("moe.backend", "auto")]);
    let ended = refused(|rank| if rank == 255 { other() } else { alike() });
    insta::assert_snapshot!("one_rank_differs", ended.message);
    for (rank, traffic) in ended.traffic.into_iter().enumerate() {
        assert_eq!(traffic, predicted(rank, &[(0, alike()), (255, other())]), "rank {rank}");
    }
}

#[test]
fn several_ranks_that_differ_in_several_ways_stay_a_few_lines() {
    let chunks = || start(&[("dispatch.chunk_tokens", "128"), ("moe.backend", "auto")]);
    let backend = || start(&[("dispatch.chunk_tokens", "64"), ("moe.backend", "simd")]);
    let old = || start(&[("moe.backend", "auto")]);
    let ended = refused(|rank| match rank {
        8..=15 => chunks(),
        64 | 72 | 200 => backend(),
        17 => old(),
        _ => alike(),
    });
    insta::assert_snapshot!("several_ranks_differ", ended.message);
    let distinct = [(0, alike()), (8, chunks()), (17, old()), (64, backend())];
    for (rank, traffic) in ended.traffic.into_iter().enumerate() {
        assert_eq!(traffic, predicted(rank, &distinct), "rank {rank}");
    }
}

/// A value that every rank has for itself should never be compared; where it is, the message is still one to read.
#[test]
fn as_many_values_as_ranks_are_counted() {
    let of_rank = |rank: usize| start(&[("dispatch.chunk_tokens", &rank.to_string())]);
    let ended = refused(of_rank);
    insta::assert_snapshot!("every_rank_differs", ended.message);
    let distinct: Vec<(usize, Local)> = (0..256).map(|rank| (rank, of_rank(rank))).collect();
    assert_eq!(ended.traffic[7], predicted(7, &distinct));
}

#[test]
fn ranks_that_failed_take_part_and_the_lowest_speaks() {
    let ended = refused(|rank| match rank {
        3 => failed("simd"),
        100..=150 => failed("reference"),
        _ => alike(),
    });
    insta::assert_snapshot!("failed_records", ended.message);
    for traffic in ended.traffic {
        assert_eq!(traffic, Traffic::of_alike(NUM_RANKS), "a failed record is as long as any other");
    }
}

#[test]
fn bytes_that_are_no_fingerprint_name_their_ranks() {
    let message = |encoded: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let good = alike().expect("fields").encode();
        let brought = [
            Brought { ranks: vec![Rank(0), Rank(3)], encoded: good.clone() },
            Brought { ranks: vec![Rank(1), Rank(2)], encoded: encoded(good) },
        ];
        let error = differences(&brought).expect_err("no fingerprint");
        let cause = std::error::Error::source(&error).expect("a cause").to_string();
        format!("exit {}: {error}\n  caused by: {cause}", error.exit().code())
    };
    let messages = [
        message(&|mut bytes| {
            bytes.pop();
            bytes
        }),
        message(&|mut bytes| {
            bytes[8] = 9;
            bytes
        }),
        message(&|_| b"something else".to_vec()),
    ];
    insta::assert_snapshot!("no_fingerprints", messages.join("\n"));
}

#[test]
fn environments_of_256_ranks_come_in_rank_order() {
    let of_rank = |rank: usize| Environment { host: Some(format!("node{}", rank / 8)), ..Environment::default() };
    let wanted: Vec<Environment> = (0..256).map(of_rank).collect();
    for (environments, traffic) in simulate(256, |ranks| gather_environments(ranks, &of_rank(ranks.rank().index()))) {
        assert_eq!(environments.expect("readable"), wanted);
        assert_eq!(traffic.collectives, 2, "lengths, then the environments");
    }
}

#[test]
fn what_may_differ_is_said_in_lines() {
    let rank = |host: &str, mpi: &str| {
        let mut environment = Environment { host: Some(host.to_owned()), ..Environment::default() };
        environment.libraries.mpi = crate::select::environment::Fact::Present(mpi.to_owned());
        environment
    };
    let differences = harmless_differences(&[rank("a", "4.1.6"), rank("b", "4.1.6"), rank("c", "4.1.4")]);
    assert_eq!(
        shown(&differences.expect("one value a name")),
        "\n    compared.mpi: 4.1.6 on ranks 0-1, 4.1.4 on rank 2"
    );
}
