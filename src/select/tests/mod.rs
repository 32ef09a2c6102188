//! Selection as a whole, on worlds and implementations that no machine at hand has.

mod cases;
mod grid;
mod messages;
pub(crate) mod worlds;
