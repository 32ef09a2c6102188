//! The cases of other systems' faults that are judged when a checkpoint is loaded.

mod files;
mod fixtures;
mod headers;
mod index;
mod layout;
mod modules;
mod scales;
