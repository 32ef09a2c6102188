//! The runtime as its users meet it: the binary under `mpirun`, with the right answers known beforehand.
//!
//! Needs Open MPI. `cases` holds one test for each reduced case of other systems' faults, under the case's letter and
//! number; `agreement` lets ranks differ; `fixtures` compares with values computed outside this project; `bits` holds the
//! determinism promises, `verdicts` and `inspect` the commands that judge, `loading` the promises about bytes and memory,
//! `transport` what carries tokens.

mod agreement;
mod bits;
mod cases;
mod fixtures;
mod inspect;
mod loading;
mod support;
mod transport;
mod verdicts;
