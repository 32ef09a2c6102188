//! What this process sees of a driver and of GPUs, as plain data. Opens nothing and allocates nothing on a device.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::driver::sys;

use super::error::{CudaError, check, code, text};
use super::library::{Absence, api};
use crate::select::environment::ComputeCapability;

/// A version of CUDA: 13.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// The part before the dot.
    pub major: u32,
    /// The part behind it.
    pub minor: u32,
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver, as far as this process can use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Driver {
    /// No driver library can be loaded.
    Absent,
    /// The library lacks functions that are needed.
    Old {
        /// Their names.
        missing: Vec<String>,
    },
    /// It is there and does not start.
    Broken {
        /// Its name for the reason.
        code: String,
        /// Its sentence.
        text: String,
    },
    /// It can be used; whether it has devices is another matter.
    Present {
        /// The newest CUDA that it serves.
        version: CudaVersion,
    },
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("there is no CUDA driver (libcuda.so.1)"),
            Self::Old { missing } => write!(f, "the CUDA driver is too old: it lacks {}", missing.join(", ")),
            Self::Broken { code, text } => write!(f, "the CUDA driver does not start ({code}: {text})"),
            Self::Present { version } => write!(f, "the CUDA driver serves CUDA {version}"),
        }
    }
}

/// A GPU that this process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number in this process; it follows `CUDA_VISIBLE_DEVICES` and tells nothing of which GPU it is.
    pub ordinal: u32,
    /// `NVIDIA H200`.
    pub name: String,
    /// `GPU-` and 32 hexadecimal digits: what tells it from every other.
    pub uuid: String,
    /// `0000:19:00.0`: where it sits in its host.
    pub pci_bus_id: String,
    /// Which machine code it runs.
    pub compute_capability: ComputeCapability,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its streaming multiprocessors.
    pub num_multiprocessors: u32,
    /// Shared memory that a block can have, static and dynamic, when it opts in.
    pub max_shared_bytes_per_block: u32,
    /// Its L2 cache.
    pub l2_bytes: u32,
}

/// The driver and the devices that this process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    /// The driver.
    pub driver: Driver,
    /// The devices by ordinal; none unless the driver is present.
    pub devices: Vec<DeviceFacts>,
}

impl Devices {
    /// Looks at the driver and at every device that it shows this process. Never fails: what is not there is a fact.
    #[must_use]
    pub fn probe() -> Self {
        let without = |driver| Self { driver, devices: Vec::new() };
        match api() {
            Ok(_) => {}
            Err(Absence::NoLibrary) => return without(Driver::Absent),
            Err(Absence::Lacks(missing)) => return without(Driver::Old { missing }),
        }
        // SAFETY: takes no pointer; the only flags there are is 0.
        let started = unsafe { sys::cuInit(0) };
        let none_visible = started == sys::CUresult::CUDA_ERROR_NO_DEVICE;
        if started != sys::CUresult::CUDA_SUCCESS && !none_visible {
            return without(Driver::Broken { code: code(started), text: text(started) });
        }
        let broken = |error: CudaError| match error {
            CudaError::Driver { code, text, operation, .. } => {
                without(Driver::Broken { code, text: format!("{text}, at {operation}") })
            }
            other => without(Driver::Broken { code: String::new(), text: other.to_string() }),
        };
        let version = match driver_version() {
            Ok(version) => version,
            Err(error) => return broken(error),
        };
        if none_visible {
            return without(Driver::Present { version });
        }
        match device_count().and_then(|count| (0..count).map(device_facts).collect()) {
            Ok(devices) => Self { driver: Driver::Present { version }, devices },
            Err(error) => broken(error),
        }
    }
}

pub(super) fn driver_version() -> Result<CudaVersion, CudaError> {
    let mut version = 0;
    // SAFETY: `version` is a place for one integer.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "asking for the driver's version", 0)?;
    // 13000 is 13.0, 12080 is 12.8.
    let version = version.unsigned_abs();
    Ok(CudaVersion { major: version / 1000, minor: version % 1000 / 10 })
}

/// Devices that this process sees. The driver has to be initialised.
pub(super) fn device_count() -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: `count` is a place for one integer.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "counting GPUs", 0)?;
    Ok(count.unsigned_abs())
}

/// The driver's handle of a device. The driver has to be initialised.
pub(super) fn device_handle(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: `device` is a place for one handle.
    check(unsafe { sys::cuDeviceGet(&raw mut device, ordinal.cast_signed()) }, "looking up a GPU", ordinal)?;
    Ok(device)
}

/// What there is to know of a device. The driver has to be initialised.
pub(super) fn device_facts(ordinal: u32) -> Result<DeviceFacts, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = device_handle(ordinal)?;
    let attribute = |attribute| -> Result<u32, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: `value` is a place for one integer, and `device` came from the driver.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        check(result, "asking for a GPU's attributes", ordinal)?;
        Ok(value.unsigned_abs())
    };
    let mut memory_bytes = 0_usize;
    // SAFETY: `memory_bytes` is a place for one size.
    let result = unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) };
    check(result, "asking for a GPU's memory", ordinal)?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is a place for 16 bytes.
    check(unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) }, "asking for a GPU's UUID", ordinal)?;
    let name = filled(ordinal, "asking for a GPU's name", |text, len| {
        // SAFETY: `text` has room for `len` bytes.
        unsafe { sys::cuDeviceGetName(text, len, device) }
    })?;
    let pci_bus_id = filled(ordinal, "asking for a GPU's PCI bus", |text, len| {
        // SAFETY: `text` has room for `len` bytes.
        unsafe { sys::cuDeviceGetPCIBusId(text, len, device) }
    })?;
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(DeviceFacts {
        ordinal,
        name,
        uuid: uuid_text(uuid.bytes.map(c_char::cast_unsigned)),
        pci_bus_id: pci_bus_id.to_ascii_lowercase(),
        compute_capability: ComputeCapability::new(major, minor),
        memory_bytes: memory_bytes as u64,
        num_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
    })
}

/// A text of at most 255 bytes that the driver fills in.
fn filled(
    ordinal: u32,
    operation: &'static str,
    fill: impl FnOnce(*mut c_char, c_int) -> sys::CUresult,
) -> Result<String, CudaError> {
    let mut text: [c_char; 256] = [0; 256];
    check(fill(text.as_mut_ptr(), 255), operation, ordinal)?;
    // SAFETY: the array ends in 0, whatever the driver wrote before its last byte.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// As `nvidia-smi` and `CUDA_VISIBLE_DEVICES` write it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_as_nvidia_smi_writes_them() {
        let bytes = *b"\x6d\x9c\x0f\x4a\x8b\xe2\xd1\x0c\x4f\xb5\x3a\x0e\x6c\x7f\x21\x90";
        assert_eq!(uuid_text(bytes), "GPU-6d9c0f4a-8be2-d10c-4fb5-3a0e6c7f2190");
    }

    #[test]
    fn a_probe_is_a_value_everywhere() {
        let devices = Devices::probe();
        assert_eq!(devices, Devices::probe());
        if !matches!(devices.driver, Driver::Present { .. }) {
            assert!(devices.devices.is_empty(), "{devices:?}");
        }
    }
}
