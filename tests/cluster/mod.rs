//! Two hosts: the binary under a real Slurm and under `mpirun` over ssh, across a network that can be cut.
//!
//! `hosts.sh` makes the hosts of namespaces of one machine, which needs root, Slurm and ssh. Where they can't be had the
//! tests say why and pass, unless `LOCKSTEP_TEST_CLUSTER=required`, as in CI. Each test brings its hosts up and takes
//! them down, one test at a time on a machine.

mod deaths;
mod differing;
mod hosts;
mod launches;
mod readme;
