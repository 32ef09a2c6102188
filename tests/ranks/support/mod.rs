//! What the tests are made of: launching, files written and read by hand, known answers, comparisons.
//!
//! Nothing here uses the product's own readers, writers or arithmetic: it would be judging itself.

pub mod browser;
pub mod checkpoint;
pub mod compare;
pub mod directed;
pub mod disturb;
pub mod driver;
pub mod fixtures;
pub mod gpu;
pub mod launch;
pub mod made;
pub mod places;
pub mod processes;
pub mod report;
pub mod run;
pub mod safetensors;
pub mod scene;
pub mod slots;
pub mod tensor;
