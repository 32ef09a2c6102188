//! The runtime as its users meet it: the binary under `mpirun`, with the right answers known beforehand.
//!
//! Needs Open MPI. `cases` holds one test for each reduced case of other systems' faults, under the case's letter and
//! number; `agreement` lets ranks differ, `equal_setups` lets them differ by nature, `tuning` their timings,
//! `agreement_cost` counts; `fixtures` compares with values computed outside this project; `bits` holds the
//! determinism promises, `verdicts` and `inspect` the commands that judge, `loading` the promises about bytes and memory,
//! `plan` what is said on paper, `transport` what carries tokens, `two_levels` tokens that are passed on, `page` and `trace`
//! what people see of a run; `cluster` runs on two hosts; `gpu` holds all that needs GPUs (`tests/gpu/run.sh`).

mod agreement;
mod agreement_cost;
mod bits;
mod cases;
#[path = "../cluster/mod.rs"]
mod cluster;
mod equal_setups;
mod fixtures;
mod gpu;
mod inspect;
mod loading;
mod page;
mod plan;
mod soak;
mod support;
mod trace;
mod transport;
mod tuning;
mod two_levels;
mod verdicts;
