//! Ends over two hosts: whatever dies, all go, on both, within the limit, with one cause and the documented code.

use std::time::{Duration, Instant};

use super::hosts::{Hosts, NODES, Way};
use crate::support::launch::{Job, Outcome};
use crate::support::scene::Scene;

/// All are gone so long after a rank has failed, or the launcher was told to end.
const LIMIT: Duration = Duration::from_secs(30);
/// And so long after a link was cut.
const CUT_LIMIT: Duration = Duration::from_secs(60);

/// A rank is held, or fails, there.
fn faulty(scene: &Scene, job: Job, fault: &str) -> Job {
    scene.run(job).env("LOCKSTEP_FAULT", fault)
}

#[track_caller]
fn assert_nothing_left(hosts: &Hosts, scene: &Scene, outcome: &Outcome) {
    assert_eq!(scene.sha256(), None, "an output: {}", outcome.printed());
    assert_eq!(scene.left_over(), Vec::<String>::new(), "{}", outcome.printed());
    hosts.assert_quiet(&outcome.command);
}

#[track_caller]
fn assert_next_run(hosts: &Hosts, scene: &Scene, way: Way) {
    let outcome = scene.run(hosts.job(way)).run().expect_code(0);
    assert!(scene.sha256().is_some(), "{}", outcome.printed());
    scene.clear();
}

#[test]
fn g5_a_rank_of_the_second_host_dies() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("timeouts: {step_s: 4}");
    for (way, faults) in [
        (Way::SrunLauncher, &[("kill", 137), ("segv", 139), ("panic", 101), ("error", 3), ("hang", 5)][..]),
        (Way::Srun, &[("kill", 137), ("error", 3)]),
        (Way::Ssh, &[("kill", 137), ("error", 3)]),
    ] {
        for (action, code) in faults {
            let outcome = faulty(&scene, hosts.job(way), &format!("2:dispatch:{action}")).run();
            assert!(outcome.elapsed < LIMIT, "{way:?} {action}: {}", outcome.printed());
            assert_eq!(outcome.code, *code, "{way:?} {action}: {}", outcome.printed());
            // Who is killed says nothing, and nobody else is blamed.
            let messages = outcome.error_messages();
            let is_said = !["kill", "segv"].contains(action);
            assert_eq!(messages.len(), usize::from(is_said), "{way:?} {action}: {}", outcome.printed());
            assert!(messages.iter().all(|message| message.contains("rank 2")), "{}", outcome.printed());
            assert_nothing_left(&hosts, &scene, &outcome);
        }
    }
    assert_next_run(&hosts, &scene, Way::SrunLauncher);
}

/// Waits until the run is in its step, cuts the second host off, and waits until all are gone, before it is joined again.
#[expect(clippy::print_stderr, reason = "how long it took is worth reading where it nears the limit")]
fn cut_in_mid_step(hosts: &Hosts, job: Job) -> Outcome {
    let outcome = job.limit(Duration::from_secs(100)).run_while(|running| {
        running.wait_for(" strikes rank ");
        hosts.link(NODES[1], "down");
        // What Slurm and ssh keep on a host that they can't reach is theirs.
        let counts = |line: &str| !line.contains("slurmstepd") && !line.contains("sshd:");
        let took = hosts.wait_until_gone(CUT_LIMIT, counts);
        eprintln!("all gone {:.1} s after the link", took.as_secs_f64());
        hosts.link(NODES[1], "up");
    });
    // A step that Slurm could not end on the other host is ended once that is back.
    hosts.wait_until_gone(CUT_LIMIT, |_| true);
    assert_eq!(outcome.code, 5, "{}", outcome.printed());
    outcome
}

/// The one cause, whatever a launcher adds.
#[track_caller]
fn assert_one_cause(outcome: &Outcome, needles: &[&str]) {
    let messages = outcome.error_messages();
    assert_eq!(messages.len(), 1, "{}", outcome.printed());
    assert!(needles.iter().all(|needle| messages[0].contains(needle)), "{}", outcome.printed());
}

/// What ranks on the first host say of the second.
const UNREACHED: &[&str] = &["host node2 (ranks 2-3) has not answered host node1 (rank 0)", "cut"];

/// Nothing crosses the link any more, no reset and no signal: each side has to find out and end by itself, also where a
/// step may take longer than that.
#[test]
fn g5_a_link_goes_down_in_mid_step() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    let outcome = cut_in_mid_step(&hosts, faulty(&scene, hosts.job(Way::SrunLauncher), "1:dispatch:delay=2"));
    assert_one_cause(&outcome, UNREACHED);
    assert_nothing_left(&hosts, &scene, &outcome);
}

#[test]
fn g5_a_link_goes_down_under_mpirun() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("timeouts: {step_s: 600}");
    let outcome = cut_in_mid_step(&hosts, faulty(&scene, hosts.job(Way::Ssh), "1:dispatch:delay=2"));
    assert_one_cause(&outcome, UNREACHED);
    assert_nothing_left(&hosts, &scene, &outcome);
}

/// `mpirun` has no ranks beside it, and bytes of the cut host are under way to it.
#[test]
fn g5_a_link_goes_down_under_mpirun_of_a_third_host() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    for way in [Way::LoginSsh, Way::Allocation] {
        let outcome = cut_in_mid_step(&hosts, faulty(&scene, hosts.job(way), "2:dispatch:delay=2"));
        assert_one_cause(&outcome, UNREACHED);
        assert_nothing_left(&hosts, &scene, &outcome);
    }
}

/// The limit passes before a host's silence has lasted long enough, and launchers have to find their way out all the same.
#[test]
fn g5_a_link_goes_down_in_a_step_of_seconds() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("timeouts: {step_s: 8}");
    for way in Way::LAUNCHERS {
        let outcome = cut_in_mid_step(&hosts, faulty(&scene, hosts.job(way), "1:dispatch:delay=2"));
        assert_one_cause(&outcome, &["phase step", "within 8 s"]);
        assert_nothing_left(&hosts, &scene, &outcome);
    }
}

/// A rank that is stopped for longer than a host may be silent is not taken for a host that is gone.
#[test]
fn a_rank_that_is_stopped_for_a_while_is_waited_for() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    let job = faulty(&scene, hosts.job(Way::SrunLauncher), "1:dispatch:delay=2");
    let outcome = job.limit(Duration::from_secs(100)).run_while(|running| {
        running.wait_for(" strikes rank ");
        hosts.signal_all(NODES[1], "/lockstep run ", "STOP");
        // Time is what this is about.
        std::thread::sleep(Duration::from_secs(35));
        hosts.signal_all(NODES[1], "/lockstep run ", "CONT");
    });
    assert_eq!(outcome.code, 0, "{}", outcome.printed());
    assert!(scene.sha256().is_some());
    hosts.assert_quiet("stopped ranks");
}

/// Runs until a rank is held in its step, then does `end`.
fn ended(job: Job, end: impl FnOnce()) -> Outcome {
    let mut told = Instant::now();
    let outcome = job.run_while(|running| {
        running.wait_for(" strikes rank ");
        told = Instant::now();
        end();
    });
    assert!(told.elapsed() < LIMIT, "{}", outcome.printed());
    assert_eq!(outcome.error_messages(), Vec::<String>::new(), "{}", outcome.printed());
    outcome
}

#[test]
fn g7_scancel_ends_with_143() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    for way in [Way::Srun, Way::SrunLauncher] {
        for (stage, rank) in [("load", 3), ("dispatch", 2), ("publish", 0)] {
            let job = faulty(&scene, hosts.job(way), &format!("{rank}:{stage}:delay=60"));
            let outcome = ended(job, || drop(hosts.shell("login", "scancel --user=root")));
            assert_eq!(outcome.code, 143, "{way:?} {stage}: {}", outcome.printed());
            assert!(outcome.stderr.contains("CANCELLED"), "{}", outcome.printed());
            assert_nothing_left(&hosts, &scene, &outcome);
        }
        assert_next_run(&hosts, &scene, way);
    }
}

#[test]
fn g7_the_launchers_are_told_to_end() {
    let Some(hosts) = Hosts::up() else { return };
    let scene = Scene::new("");
    for (way, script) in [(Way::SrunLauncher, "srun.sh"), (Way::Ssh, "mpirun.sh")] {
        for (signal, code, name) in [("TERM", 143, "SIGTERM"), ("INT", 130, "Ctrl-C (SIGINT)")] {
            // Rank 0 writes: what it has begun is removed.
            let job = faulty(&scene, hosts.job(way), "0:publish:delay=60");
            let outcome = ended(job, || hosts.signal(&format!("launch/{script}"), signal));
            assert_eq!(outcome.code, code, "{way:?}: {}", outcome.printed());
            let said = format!("{script}: ended on {name}");
            assert_eq!(outcome.stderr.matches(&said).count(), 1, "{way:?}: {}", outcome.printed());
            assert_nothing_left(&hosts, &scene, &outcome);
        }
        assert_next_run(&hosts, &scene, way);
    }
}
