//! `GRANULE_CONF`: settings of the allocator under PyTorch, as text.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::record::RecordDriver;
use crate::units::{GIB, KIB, MIB, TIB};
use crate::{Device, Error, HeapConfig, Policy, PoolConfig, Rounding};

/// Settings in the manner of `PYTORCH_CUDA_ALLOC_CONF`: `key:value,key:value`. Sizes are bytes, or numbers with `KiB`, `MiB`,
/// `GiB` or `TiB`.
///
/// | key | value | what |
/// |-----|-------|------|
/// | `driver` | `cuda`, `host`, `sim` | which driver; `cuda` by default |
/// | `budget` | size | the most that may be created; all of the device by default |
/// | `per_process_memory_fraction` | 0 to 1 | the same as a part of the device's memory |
/// | `base` | size | created up front and kept |
/// | `watermark` | size | idle memory that is kept for reuse; an eighth of the budget by default |
/// | `granule_max`, `granule_min` | size | [`HeapConfig::granule_max`], [`HeapConfig::granule_min`] |
/// | `granules` | count | [`HeapConfig::granules`] |
/// | `slack` | 1/10,000 | [`HeapConfig::slack`] and [`PoolConfig::slack`] |
/// | `aliases` | count | [`HeapConfig::aliases`]; 0 unmaps at once, so that a use after free faults |
/// | `wait_ms` | milliseconds | [`HeapConfig::wait`] and [`PoolConfig::wait`] |
/// | `roundup_power2_divisions` | power of two | [`Rounding::Divisions`]; 1 is [`Rounding::PowerOfTwo`] |
/// | `zero` | `True`, `False` | [`PoolConfig::zero_on_handover`] |
/// | `timing` | `True`, `False` | count and time allocations, frees and driver calls, for `granule_torch_costs`; some 50 ns each |
///
/// Keys that PyTorch knows and that mean nothing here, such as `expandable_segments` and `max_split_size_mb`, are errors
/// as all others: a setting that does nothing is a mistake.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Conf {
    pub(super) driver: Option<String>,
    budget: Option<u64>,
    fraction: Option<f64>,
    base: u64,
    watermark: Option<u64>,
    zero: bool,
    timing: bool,
    wait: Option<Duration>,
    heap: HeapConfig,
}

/// Why a text is no configuration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfError {
    /// No colon, or nothing on a side of it.
    #[error("{part:?} is not key:value")]
    Form {
        /// What is between two commas.
        part: String,
    },
    /// A key that means nothing.
    #[error("unknown key {key:?}; known are {KEYS}")]
    Key {
        /// The key.
        key: String,
    },
    /// A key given twice.
    #[error("key {key:?} is given twice")]
    Twice {
        /// The key.
        key: String,
    },
    /// A value that does not fit its key.
    #[error("{key}:{value} makes no sense: {why}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What it should be.
        why: &'static str,
    },
}

const KEYS: &str = "driver, budget, per_process_memory_fraction, base, watermark, granule_max, granule_min, granules, slack, \
                    aliases, wait_ms, roundup_power2_divisions, zero, timing";

impl std::str::FromStr for Conf {
    type Err = ConfError;

    fn from_str(text: &str) -> Result<Self, ConfError> {
        let mut conf = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let pair = part.split_once(':');
            let pair = pair.map(|(key, value)| (key.trim(), value.trim()));
            let pair = pair.filter(|(key, value)| !key.is_empty() && !value.is_empty());
            let (key, value) = pair.ok_or_else(|| ConfError::Form {
                part: part.to_owned(),
            })?;
            if seen.contains(&key) {
                return Err(ConfError::Twice {
                    key: key.to_owned(),
                });
            }
            seen.push(key);
            conf.set(key, value)?;
        }
        Ok(conf)
    }
}

impl Conf {
    fn set(&mut self, key: &str, value: &str) -> Result<(), ConfError> {
        let wrong = |why| ConfError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            why,
        };
        let size = || size(value).ok_or_else(|| wrong("it is no size such as 512MiB or 1.5GiB"));
        let count = || value.parse::<u32>();
        let count = || count().map_err(|_| wrong("it is no whole number"));
        let flag = || match value {
            "True" | "true" | "1" => Ok(true),
            "False" | "false" | "0" => Ok(false),
            _ => Err(wrong("it is not True or False")),
        };
        match key {
            "driver" => match value {
                "cuda" | "host" | "sim" => self.driver = Some(value.to_owned()),
                _ => return Err(wrong("it is not cuda, host or sim")),
            },
            "budget" => self.budget = Some(size()?),
            "per_process_memory_fraction" => {
                let fraction = value.parse().ok().filter(|f| (0.0..=1.0).contains(f));
                self.fraction = Some(fraction.ok_or_else(|| wrong("it is not from 0 to 1"))?);
            }
            "base" => self.base = size()?,
            "watermark" => self.watermark = Some(size()?),
            "granule_max" => self.heap.granule_max = size()?,
            "granule_min" => self.heap.granule_min = size()?,
            "granules" => self.heap.granules = count()?,
            "slack" => self.heap.slack = count()?,
            "aliases" => self.heap.aliases = count()? as usize,
            "wait_ms" => self.wait = Some(Duration::from_millis(count()?.into())),
            "roundup_power2_divisions" => {
                self.heap.rounding = match count()? {
                    1 => Rounding::PowerOfTwo,
                    n if n.is_power_of_two() => Rounding::Divisions(n),
                    _ => return Err(wrong("it is no power of two")),
                }
            }
            "zero" => self.zero = flag()?,
            "timing" => self.timing = flag()?,
            _ => {
                return Err(ConfError::Key {
                    key: key.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// The pool's settings on a device. The smaller of budget and fraction counts.
    pub(super) fn pool(&self, device: &Device) -> PoolConfig {
        let part = self
            .fraction
            .map(|f| fraction_of(f, device.info().total_memory));
        let budget = match (self.budget, part) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let default = PoolConfig::default();
        PoolConfig {
            budget,
            policy: Policy::Hybrid { base: self.base },
            watermark: self.watermark,
            slack: Some(self.heap.slack),
            zero_on_handover: self.zero,
            wait: self.wait.unwrap_or(default.wait),
            ..default
        }
    }

    /// The heap's settings on a device of so much memory: a budget may be raised later, so addresses are for all of it.
    pub(super) fn heap(&self, total: u64) -> HeapConfig {
        HeapConfig {
            wait: self.wait.unwrap_or(self.heap.wait),
            addresses: Some(total.saturating_mul(4).min(TIB - 2 * MIB)),
            ..self.heap.clone()
        }
    }

    /// Opens the device of a number, and what counts its calls if that is wanted.
    pub(super) fn open(&self, ordinal: u32) -> Result<(Device, Option<Arc<RecordDriver>>), Error> {
        let device = match self.driver.as_deref() {
            None | Some("cuda") => Device::cuda(ordinal)?,
            Some(name) => Device::by_name(name)?,
        };
        if !self.timing {
            return Ok((device, None));
        }
        let record = Arc::new(RecordDriver::new(device.driver().clone()));
        Ok((Device::from_driver(record.clone()), Some(record)))
    }
}

/// So much of `total` bytes.
pub(super) fn fraction_of(fraction: f64, total: u64) -> u64 {
    // Sizes of memory are far below 2^53, where `f64` is exact.
    (fraction.clamp(0.0, 1.0) * total as f64) as u64
}

/// Bytes of a text such as `512MiB`.
fn size(text: &str) -> Option<u64> {
    let units = [("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", TIB)];
    let found = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?.trim_end(), *unit)));
    let Some((number, unit)) = found else {
        return text.parse().ok();
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit);
    }
    let bytes = number.parse::<f64>().ok()? * unit as f64;
    (bytes.is_finite() && (0.0..1e18).contains(&bytes)).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read() {
        let conf: Conf =
            "budget:1.5GiB, granule_max:64MiB,aliases:0,wait_ms:20,zero:True,timing:1,"
                .parse()
                .unwrap();
        assert_eq!(conf.budget, Some(3 * GIB / 2));
        assert_eq!((conf.heap.granule_max, conf.heap.aliases), (64 * MIB, 0));
        assert_eq!(conf.wait, Some(Duration::from_millis(20)));
        assert!(conf.zero && conf.timing);
        assert_eq!("".parse::<Conf>().unwrap(), Conf::default());
        assert_eq!(size("4096"), Some(4096));
    }

    #[test]
    fn mistakes_are_told_apart() {
        let error = |text: &str| text.parse::<Conf>().unwrap_err();
        for key in ["expandable_segments", "max_split_size_mb", "budgets"] {
            let got = error(&format!("{key}:1"));
            assert!(
                matches!(&got, ConfError::Key { key: k } if k == key),
                "{got}"
            );
        }
        assert!(matches!(error("budget"), ConfError::Form { .. }));
        assert!(matches!(error("budget:"), ConfError::Form { .. }));
        assert!(matches!(error("zero:0,zero:1"), ConfError::Twice { .. }));
        for text in [
            "budget:-1",
            "budget:1GB",
            "budget:nanGiB",
            "budget:99999999999TiB",
            "per_process_memory_fraction:1.5",
            "driver:rocm",
            "roundup_power2_divisions:3",
            "zero:maybe",
            "timing:2",
            "slack:x",
        ] {
            assert!(matches!(error(text), ConfError::Value { .. }), "{text}");
        }
    }
}
