//! How tokens reach their experts and how rows come back.
//!
//! [`placement`], [`plan`], [`layout`], [`travel`] and [`capacity`] are pure: from counts and ids that every rank knows they decide
//! all that is sent. [`host`] carries it out over MPI and decides nothing.

pub mod capacity;
pub mod combine;
pub mod host;
pub mod layout;
pub mod placement;
pub mod plan;
pub mod travel;
