//! How tokens reach their experts and how rows come back.
//!
//! [`placement`], [`plan`], [`layout`], [`travel`], [`capacity`], [`staging`] and [`choice`] are pure: from counts and ids that
//! every rank knows they decide all that is sent. [`transport`] packs and unpacks by them, and a [`carrier`] moves the bytes:
//! MPI, or [`nccl`] between GPUs.

pub mod capacity;
pub mod carrier;
pub mod choice;
pub mod combine;
pub mod layout;
pub mod nccl;
pub mod placement;
pub mod plan;
pub mod staging;
pub mod transport;
pub mod travel;
