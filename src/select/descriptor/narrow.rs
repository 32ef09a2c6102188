//! An instance may serve less than its descriptor says, never more.

use super::{CapabilityRange, Descriptor, Limits, Target, Width};
use crate::exit::{Classify, Exit};

/// An instance that claims more than its descriptor: a bug in the code that made it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "an instance of {identity} claims more than its descriptor admits: {}; widen the descriptor, where it is written, or \
     narrow the instance",
    fields.join(", ")
)]
pub struct WidenedError {
    /// The descriptor's identity.
    pub identity: String,
    /// The fields that are wider.
    pub fields: Vec<&'static str>,
}

impl Classify for WidenedError {
    fn exit(&self) -> Exit {
        Exit::Bug
    }
}

impl Descriptor {
    /// This descriptor with what `edit` takes away.
    ///
    /// # Errors
    /// If `edit` adds anything, or changes the identity.
    pub fn narrow(&self, edit: impl FnOnce(&mut Self)) -> Result<Self, WidenedError> {
        let mut narrowed = self.clone();
        edit(&mut narrowed);
        let fields = self.widened_by(&narrowed);
        if fields.is_empty() {
            return Ok(narrowed);
        }
        Err(WidenedError { identity: self.identity.to_string(), fields })
    }

    /// The fields in which `other` admits something that this one does not.
    #[must_use]
    pub fn widened_by(&self, other: &Self) -> Vec<&'static str> {
        // Taken apart by name, so that a field that is added has to be thought of here.
        let Self {
            identity,
            target,
            libraries,
            opt_in,
            deprecated,
            activations,
            bias,
            routing,
            num_topk,
            hidden,
            intermediate,
            num_local_experts,
            uneven_experts,
            max_tensor_parallel,
            max_num_nodes,
            transports,
            forwards,
            forwards_unasked,
            payloads,
            combine_dtypes,
            batch_invariant,
        } = self;
        let lowers_library = libraries.iter().any(|(library, needed)| other.libraries.get(library) != Some(needed));
        let nodes = |max: &Option<u32>| max.unwrap_or(u32::MAX);
        let kept = [
            ("identity", other.identity == *identity),
            ("target", target.covers(&other.target)),
            ("libraries", !lowers_library),
            ("opt_in", opt_in.is_none() || other.opt_in == *opt_in),
            ("deprecated", deprecated.is_none() || other.deprecated.is_some()),
            ("activations", other.activations.is_subset(activations)),
            ("bias", *bias || !other.bias),
            ("routing", other.routing.is_subset(routing)),
            ("num_topk", num_topk.covers(other.num_topk)),
            ("hidden", hidden.covers(other.hidden)),
            ("intermediate", intermediate.covers(other.intermediate)),
            ("num_local_experts", num_local_experts.covers(other.num_local_experts)),
            ("uneven_experts", *uneven_experts || !other.uneven_experts),
            ("max_tensor_parallel", other.max_tensor_parallel <= *max_tensor_parallel),
            ("max_num_nodes", nodes(&other.max_num_nodes) <= nodes(max_num_nodes)),
            ("transports", other.transports.iter().all(|transport| transports.contains(transport))),
            ("forwards", other.forwards.is_none_or(|theirs| forwards.is_some_and(|ours| ours.covers(theirs)))),
            ("forwards_unasked", *forwards_unasked || !other.forwards_unasked),
            ("payloads", other.payloads.iter().all(|payload| payloads.contains(payload))),
            ("combine_dtypes", other.combine_dtypes.iter().all(|dtype| combine_dtypes.contains(dtype))),
            ("batch_invariant", *batch_invariant || !other.batch_invariant),
        ];
        kept.into_iter().filter(|(_, kept)| !kept).map(|(field, _)| field).collect()
    }
}

impl Target {
    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu { instruction_sets: ours }, Self::Cpu { instruction_sets: theirs }) => {
                // A subset's lowest set is no lower, so that it admits no machine that we refuse.
                theirs.is_subset(ours)
            }
            (Self::Gpu { compute_capabilities: ours }, Self::Gpu { compute_capabilities: theirs }) => {
                theirs.iter().all(|range| ours.iter().any(|known| known.covers(range)))
            }
            (Self::Cpu { .. }, Self::Gpu { .. }) | (Self::Gpu { .. }, Self::Cpu { .. }) => false,
        }
    }
}

impl CapabilityRange {
    fn covers(&self, other: &Self) -> bool {
        let ends = match (self.last, other.last) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(ours), Some(theirs)) => theirs <= ours,
        };
        self.first <= other.first && ends
    }
}

impl Limits {
    fn covers(self, other: Self) -> bool {
        let max = |limits: Self| limits.max.unwrap_or(usize::MAX);
        self.min <= other.min && max(other) <= max(self)
    }
}

impl Width {
    fn covers(self, other: Self) -> bool {
        other.multiple_of.is_multiple_of(self.multiple_of) && self.limits.covers(other.limits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::environment::InstructionSet;
    use super::super::super::identity::{Identity, Quant};
    use super::super::super::problem::ActivationForm;
    use super::super::super::registry::Registry;
    use super::*;

    fn simd() -> Descriptor {
        let registry = Registry::builtin();
        registry.descriptor(Identity::grouped_gemm("simd", Quant::Nvfp4)).unwrap().clone()
    }

    #[test]
    fn an_instance_may_take_away() {
        let simd = simd();
        let narrowed = simd
            .narrow(|instance| {
                instance.activations.remove(&ActivationForm::Swiglu);
                instance.hidden = Width { multiple_of: 32, limits: Limits::between(32, 4096) };
                instance.num_topk = Limits::between(1, 8);
                instance.target = Target::Cpu { instruction_sets: [InstructionSet::Avx512].into() };
                instance.opt_in = Some("LOCKSTEP_TRY");
                instance.max_num_nodes = Some(1);
            })
            .unwrap();
        assert_eq!(simd.widened_by(&narrowed), [""; 0]);
        assert!(!narrowed.widened_by(&simd).is_empty());
    }

    #[test]
    fn an_instance_may_not_add() {
        let narrowed = simd().narrow(|d| d.forwards = Some(Limits::between(1, 8))).unwrap();
        assert_eq!(narrowed.narrow(|d| d.forwards = simd().forwards).unwrap_err().fields, ["forwards"]);
        let narrowed = narrowed.narrow(|d| (d.forwards, d.forwards_unasked) = (None, false)).unwrap();
        let widened = narrowed.narrow(|d| (d.forwards, d.forwards_unasked) = (Some(Limits::between(1, 8)), true));
        assert_eq!(widened.unwrap_err().fields, ["forwards", "forwards_unasked"]);
        type Edit = fn(&mut Descriptor);
        let edits: [(&str, Edit); 10] = [
            ("identity", |d| d.identity.quant = Quant::None),
            ("target", |d| d.target = Target::Gpu { compute_capabilities: vec![CapabilityRange::only(9, 0)] }),
            ("activations", |d| d.activations = ActivationForm::ALL.into()),
            ("bias", |d| d.bias = true),
            ("num_topk", |d| d.num_topk = Limits::from(0)),
            ("hidden", |d| d.hidden = Width::multiple_of(8)),
            ("intermediate", |d| d.intermediate.multiple_of = 24),
            ("max_tensor_parallel", |d| d.max_tensor_parallel = 2),
            ("transports", |d| d.transports.push(crate::config::Transport::Nccl)),
            ("payloads", |d| d.payloads.push(crate::config::Payload::Auto)),
        ];
        for (field, edit) in edits {
            let error = simd().narrow(edit).unwrap_err();
            assert!(error.fields.contains(&field), "{field}: {error}");
            assert!(error.to_string().contains("lockstep.simd.grouped_gemm.nvfp4"), "{error}");
        }
    }

    #[test]
    fn a_requirement_may_not_be_dropped() {
        let base = simd()
            .narrow(|d| {
                d.opt_in = Some("LOCKSTEP_TRY");
                d.libraries = [(crate::select::environment::Library::Nccl, Some("2.20"))].into();
                d.deprecated = Some("use another");
                d.batch_invariant = false;
            })
            .unwrap();
        let error = base
            .narrow(|d| {
                d.opt_in = None;
                d.libraries.clear();
                d.deprecated = None;
                d.batch_invariant = true;
            })
            .unwrap_err();
        assert_eq!(error.fields, ["libraries", "opt_in", "deprecated", "batch_invariant"]);
    }
}
