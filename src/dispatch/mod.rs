//! How tokens reach their experts and how rows come back.
//!
//! [`placement`], [`plan`], [`layout`], [`travel`], [`capacity`], [`counts`], [`region`] and [`choice`] are pure: from counts and
//! ids that every rank knows they decide all that is sent. [`transport`] packs and unpacks by them on hosts, over MPI. [`device`]
//! does on GPUs, where what is packed is stored into the memory of the GPU that it is for ([`nvlink`]), or a [`carrier`] moves the
//! bytes: [`nccl`] between GPUs, or MPI through hosts ([`staged`]).

pub mod capacity;
pub mod carrier;
pub mod choice;
pub mod combine;
pub mod counts;
pub mod device;
pub mod layout;
pub mod nccl;
pub mod nodes;
pub mod nvlink;
pub mod placement;
pub mod plan;
pub mod region;
pub mod staged;
pub mod transport;
pub mod travel;
pub mod two_level;
