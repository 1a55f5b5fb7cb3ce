//! Handles: integers that name an object, and nothing else once it is closed.

use std::sync::{Arc, OnceLock};

use slotmap::{DefaultKey, Key, KeyData, SlotMap};

use super::error::{Failure, GRANULE_STALE, GRANULE_TOO_LARGE, Outcome};
use crate::sync::RwLock;
use crate::{Arena, Device, Heap, Pool, Stream};

/// Bits of a slot's number; above them is the kind, and in the upper half the generation.
const SLOT_BITS: u32 = 24;
const KIND_MASK: u64 = 0xff << SLOT_BITS;

/// Objects of one kind.
pub(super) struct Table<T> {
    what: &'static str,
    kind: u64,
    slots: RwLock<SlotMap<DefaultKey, Arc<T>>>,
}

impl<T> Table<T> {
    fn new(what: &'static str, kind: u64) -> Self {
        Self {
            what,
            kind: kind << SLOT_BITS,
            slots: RwLock::new(SlotMap::new()),
        }
    }

    /// A handle for an object.
    pub(super) fn insert(&self, object: T) -> Outcome<u64> {
        let mut slots = self.slots.write();
        let key = slots.insert(Arc::new(object));
        let raw = key.data().as_ffi();
        if raw & KIND_MASK != 0 {
            let object = slots.remove(key);
            drop(slots);
            drop(object);
            let message = format!("more than {} {}s are open", 1 << SLOT_BITS, self.what);
            return Err(Failure::new(GRANULE_TOO_LARGE, message));
        }
        Ok(raw | self.kind)
    }

    fn key(&self, handle: u64) -> Option<DefaultKey> {
        let raw = handle & !KIND_MASK;
        let data = KeyData::from_ffi(raw);
        // A number that is no handle may be taken for another one.
        (handle & KIND_MASK == self.kind && data.as_ffi() == raw).then(|| data.into())
    }

    fn stale(&self, handle: u64) -> Failure {
        let message = format!("{handle:#x} is no open {}", self.what);
        Failure::new(GRANULE_STALE, message)
    }

    /// The object. It lives on in the answer when somebody closes the handle meanwhile.
    pub(super) fn get(&self, handle: u64) -> Outcome<Arc<T>> {
        let slots = self.slots.read();
        let object = self.key(handle).and_then(|key| slots.get(key)).cloned();
        object.ok_or_else(|| self.stale(handle))
    }

    fn len(&self) -> usize {
        self.slots.read().len()
    }

    /// All objects there are.
    pub(super) fn all(&self) -> Vec<Arc<T>> {
        self.slots.read().values().cloned().collect()
    }

    /// Takes the object out. Drop it without a lock: it may wait.
    pub(super) fn remove(&self, handle: u64) -> Outcome<Arc<T>> {
        let taken = self
            .key(handle)
            .and_then(|key| self.slots.write().remove(key));
        taken.ok_or_else(|| self.stale(handle))
    }
}

/// All objects that C holds.
pub(super) struct Tables {
    pub(super) devices: Table<Device>,
    pub(super) streams: Table<Stream>,
    pub(super) pools: Table<Pool>,
    /// Behind a lock, since giving back without a wait takes the arena for itself.
    pub(super) arenas: Table<RwLock<Arena>>,
    pub(super) heaps: Table<Heap>,
    pub(super) imports: Table<super::dlpack::Import>,
}

impl Tables {
    /// Handles that are open.
    pub(super) fn open(&self) -> usize {
        let memory = self.pools.len() + self.arenas.len() + self.heaps.len() + self.imports.len();
        self.devices.len() + self.streams.len() + memory
    }
}

/// The tables. Never dropped: at exit the driver may be gone before them.
pub(super) fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| Tables {
        devices: Table::new("device", 1),
        streams: Table::new("stream", 2),
        pools: Table::new("pool", 3),
        arenas: Table::new("arena", 4),
        heaps: Table::new("heap", 5),
        imports: Table::new("DLPack import", 6),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_handle_never_names_another_object() {
        let table = Table::new("thing", 7);
        let first = table.insert(1).unwrap();
        assert_eq!(*table.get(first).unwrap(), 1);
        table.remove(first).unwrap();
        let mut seen = vec![first];
        for i in 0..100 {
            let next = table.insert(i).unwrap();
            assert!(!seen.contains(&next));
            assert_eq!(table.get(first).unwrap_err().status, GRANULE_STALE);
            table.remove(next).unwrap();
            seen.push(next);
        }
        assert!(seen.iter().all(|handle| table.remove(*handle).is_err()));
    }

    #[test]
    fn numbers_that_are_no_handles_are_refused() {
        let table = Table::new("thing", 7);
        let other = Table::new("other", 8);
        let handle = table.insert(1).unwrap();
        other.insert(2).unwrap();
        assert!(other.get(handle).is_err());
        for bit in 0..64 {
            assert!(table.get(handle ^ 1 << bit).is_err(), "bit {bit}");
        }
        assert!(table.get(0).is_err() && table.get(u64::MAX).is_err());
    }
}
