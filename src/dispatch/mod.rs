//! How tokens reach their experts and how rows come back.
//!
//! [`placement`], [`nodes`], [`plan`], [`two_level`], [`layout`], [`packing`], [`travel`], [`capacity`], [`counts`], [`crossing`],
//! [`region`], [`overlap`] and [`choice`] are pure: from counts and ids that every rank knows they decide all that is sent. [`transport`] packs
//! and unpacks by them on hosts, over MPI. [`device`] does on GPUs, where what is packed is stored into the memory of the GPU that
//! it is for ([`nvlink`]), or a [`carrier`] moves the bytes: [`nccl`] between GPUs, or MPI through hosts ([`staged`]). Between the
//! hops of two levels the ranks of a node tell each other what comes ([`passing`]).

pub mod capacity;
pub mod carrier;
pub mod choice;
pub mod combine;
pub mod counts;
pub mod crossing;
pub mod device;
pub mod layout;
pub mod nccl;
pub mod nodes;
pub mod nvlink;
pub mod overlap;
pub mod packing;
pub mod passing;
pub mod placement;
pub mod plan;
pub mod region;
pub mod staged;
pub mod transport;
pub mod travel;
pub mod two_level;
