//! Reservations: ranges of addresses with nothing behind them yet.

use crate::driver::{Driver, DriverError};
use crate::units::{Va, VaRange, round_up};
use crate::{Device, Error, Result};

/// A reserved range of device addresses, freed when dropped. Whoever maps into it unmaps first.
#[derive(Debug)]
pub(crate) struct Reservation {
    device: Device,
    range: VaRange,
    live: bool,
}

impl Reservation {
    /// Reserves `wanted` bytes, or as much less as the driver and the address bound allow, halving
    /// down to `at_least`. Lengths are multiples of `unit`.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] when rounding overflows (no driver call is made then),
    /// [`Error::AddressSpaceExhausted`] when not even `at_least` can be had, or a driver error that
    /// is not about memory.
    pub(crate) fn new(device: &Device, wanted: u64, at_least: u64, unit: u64) -> Result<Self> {
        let too_large = |requested| Error::TooLarge {
            requested,
            max: u64::MAX - (unit - 1),
        };
        let mut len = round_up(wanted, unit).ok_or(too_large(wanted))?;
        let floor = round_up(at_least.min(wanted), unit).ok_or(too_large(at_least))?;
        loop {
            let error = match Self::exactly(device, len) {
                Ok(reservation) => return Ok(reservation),
                Err(error) => error,
            };
            let shortage = match &error {
                Error::AddressSpaceExhausted { .. } => true,
                other => other.is_out_of_memory(),
            };
            if !shortage {
                return Err(error);
            }
            if len <= floor {
                return Err(device.no_addresses(len));
            }
            len = round_up(len / 2, unit).unwrap_or(floor).max(floor);
        }
    }

    fn exactly(device: &Device, len: u64) -> Result<Self> {
        device.sweep();
        device.admit_addresses(len)?;
        match device.driver().reserve(len, 0) {
            Ok(range) => Ok(Self {
                device: device.clone(),
                range,
                live: true,
            }),
            Err(error) => {
                device.discharge_addresses(len);
                Err(error.into())
            }
        }
    }

    pub(crate) fn range(&self) -> VaRange {
        self.range
    }

    pub(crate) fn base(&self) -> Va {
        self.range.start()
    }

    pub(crate) fn len(&self) -> u64 {
        self.range.len()
    }

    pub(crate) fn is_live(&self) -> bool {
        self.live
    }

    /// Gives the addresses back. Once that has succeeded, again and `Drop` do nothing.
    pub(crate) fn free(&mut self) -> Result<(), DriverError> {
        if self.live {
            self.device.driver().free_reservation(self.range)?;
            self.live = false;
            self.device.discharge_addresses(self.range.len());
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.live {
            let range = self.range;
            let device = self.device.clone();
            let retry = move |d: &dyn Driver| {
                d.free_reservation(range)?;
                device.discharge_addresses(range.len());
                Ok(())
            };
            self.device.give_back("reservation", Box::new(retry));
        }
    }
}
