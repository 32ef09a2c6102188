//! Keys in the compared record, and messages that no launcher provokes here.

use super::super::arch::Arch;
use super::super::kernels::DenseKernels;
use super::super::nvrtc::Compiled;
use super::*;
use crate::exit::{Classify, Exit};
use crate::facts::BUILD;
use crate::select::fingerprint::FieldDifference;

fn prepared(define: bool, compiler: &str) -> Prepared {
    let mut request = DenseKernels.request(Arch::Sm90a);
    let described = request.clone();
    if define {
        request = request.with("STALE", true);
    }
    let parts = KeyParts::new(&request, &CompilerId::from_text(compiler));
    let compiled = Compiled { cubin: vec![0; 16], usage: Vec::new(), log: String::new(), elapsed: Duration::ZERO };
    let artefact = Artefact::new(&request, parts, compiled);
    Prepared { kernels: vec![(described, artefact)], num_compiled: 1, num_received: 0, elapsed: Duration::ZERO }
}

/// Hazard 7: what a rank's kernels are made of is in what all ranks compare.
#[test]
fn hazard_07_keys_are_in_the_session_fingerprint() {
    let fingerprint = |prepared: &Prepared| {
        let mut start = crate::select::fingerprint::StartBuilder::new(BUILD);
        let selection = start.asked("x", "y").clone().finish().expect("fields");
        let mut fields = SessionBuilder::new(&selection);
        prepared.add_to(&mut fields);
        fields.finish().expect("fields")
    };
    let alike = fingerprint(&prepared(false, "13.0.88 (a)"));
    assert_eq!(alike.digest(), fingerprint(&prepared(false, "13.0.88 (a)")).digest());
    for other in [prepared(true, "13.0.88 (a)"), prepared(false, "13.0.88 (b)")] {
        let other = fingerprint(&other);
        let differences: Vec<FieldDifference> =
            crate::select::fingerprint::diff([(Rank(0), &alike), (Rank(1), &other)]);
        assert_eq!(differences.len(), 1, "{differences:?}");
        assert!(differences[0].field.starts_with("kernels.dense for sm_90a"), "{differences:?}");
    }
}

#[test]
fn compilers_of_two_builds_are_named_with_their_ranks() {
    let error = JitError::compilers(&["13.0.88 (a)", "", "13.0.88 (b)", "13.0.88 (a)"].map(str::to_owned));
    assert_eq!(
        error.to_string(),
        "the ranks have NVRTC of different builds, whose kernels may differ: 13.0.88 (a) on ranks 0, 3, 13.0.88 (b) on rank 2; \
         give every rank the same"
    );
    assert_eq!(error.exit(), Exit::Disagreement);
}

#[test]
fn directories_follow_the_users_cache() {
    assert_eq!(default_dir(Some("/x"), Some("/h")).as_deref(), Some("/x/lockstep"));
    assert_eq!(default_dir(None, Some("/h")).as_deref(), Some("/h/.cache/lockstep"));
    assert_eq!(default_dir(None, None), None);
}
