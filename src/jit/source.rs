//! The sources of kernels: embedded in the binary, so that a build has one set of them.

/// A file that a kernel includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// As `#include` names it.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// A kernel's source with every header that it includes, directly or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSource {
    /// What its artefacts are called: lower-case letters, digits, underscores.
    pub name: &'static str,
    /// The text of its `.cu` file.
    pub main: &'static str,
    /// Its headers.
    pub headers: &'static [Header],
}

/// The header `kernels/NAME`.
macro_rules! header {
    ($name:literal) => {
        Header { name: $name, text: include_str!(concat!("../../kernels/", $name)) }
    };
}

pub(super) const ABREAST: Header = header!("abreast.cuh");
pub(super) const ACTIVATION: Header = header!("activation.cuh");
pub(super) const BASE: Header = header!("base.cuh");
pub(super) const EXPERT: Header = header!("expert.cuh");
pub(super) const EXPERTS: Header = header!("experts.cuh");
pub(super) const FEW: Header = header!("few.cuh");
pub(super) const FEW_SEND: Header = header!("few_send.cuh");
pub(super) const FEW_TAKE: Header = header!("few_take.cuh");
pub(super) const GATHER: Header = header!("gather.cuh");
pub(super) const HEAR: Header = header!("hear.cuh");
pub(super) const HOPPER: Header = header!("hopper.cuh");
pub(super) const IMAGE: Header = header!("image.cuh");
pub(super) const LIVE: Header = header!("live.cuh");
pub(super) const NVFP4: Header = header!("nvfp4.cuh");
pub(super) const PACK_VALUES: Header = header!("pack_values.cuh");
pub(super) const PAYLOAD: Header = header!("payload.cuh");
pub(super) const PEERS: Header = header!("peers.cuh");
pub(super) const PLACEMENT: Header = header!("placement.cuh");
pub(super) const RANGES_FEED: Header = header!("ranges_feed.cuh");
pub(super) const RANGES_ROWS: Header = header!("ranges_rows.cuh");
pub(super) const REQUANTISE: Header = header!("requantise.cuh");
pub(super) const SETTLE: Header = header!("settle.cuh");
pub(super) const SMALL_FEED: Header = header!("small_feed.cuh");
pub(super) const SMALL_PLAN: Header = header!("small_plan.cuh");
pub(super) const STORE: Header = header!("store.cuh");
pub(super) const TILES: Header = header!("tiles.cuh");
pub(super) const TURNS: Header = header!("turns.cuh");
pub(super) const UNPACK_VALUES: Header = header!("unpack_values.cuh");
pub(super) const WEIGHTS: Header = header!("weights.cuh");
pub(super) const WGMMA_EPILOGUE: Header = header!("wgmma_epilogue.cuh");
pub(super) const WGMMA_TILES: Header = header!("wgmma_tiles.cuh");

impl KernelSource {
    /// The files that `main` and the headers include and that are not among the headers. Empty, or the kernel can't compile.
    #[must_use]
    pub fn missing_headers(&self) -> Vec<&'static str> {
        let texts = self.headers.iter().map(|header| header.text).chain([self.main]);
        let included = texts.flat_map(|text| text.lines().filter_map(included));
        included.filter(|name| self.headers.iter().all(|header| header.name != *name)).collect()
    }

    /// The headers that nothing includes: they would change keys for nothing.
    #[must_use]
    pub fn unused_headers(&self) -> Vec<&'static str> {
        let texts: Vec<&str> = self.headers.iter().map(|header| header.text).chain([self.main]).collect();
        let is_used = |name: &str| texts.iter().flat_map(|text| text.lines().filter_map(included)).any(|n| n == name);
        self.headers.iter().map(|header| header.name).filter(|name| !is_used(name)).collect()
    }
}

/// The name in `#include "name"`.
fn included(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
    rest.strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_followed_into_headers() {
        const B: Header = Header { name: "b.cuh", text: "  # include \"c.cuh\"\n// \"d.cuh\"\n" };
        const E: Header = Header { name: "e.cuh", text: "" };
        let source = KernelSource { name: "k", main: "#include \"b.cuh\"\nint x;\n", headers: &[B, E] };
        assert_eq!(source.missing_headers(), ["c.cuh"]);
        assert_eq!(source.unused_headers(), ["e.cuh"]);
    }
}
