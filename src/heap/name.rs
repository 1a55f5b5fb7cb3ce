//! Names of blocks: kept beside the books, so that blocks without one pay nothing.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::lane::{FREED, Lane, State};
use crate::Result;
use crate::units::Va;

/// Mark of a live block in the core that has a name. Freeing a block expects no mark, so that only named
/// blocks take the longer way.
pub(super) const NAMED: u32 = 2;

/// The name of a block, for people: it shows in snapshots, errors and traces. Cheap to clone.
#[derive(Clone)]
pub struct BlockName(Text);

#[derive(Clone)]
enum Text {
    Static(&'static str),
    Shared(Arc<str>),
}

impl Deref for BlockName {
    type Target = str;

    fn deref(&self) -> &str {
        match &self.0 {
            Text::Static(text) => text,
            Text::Shared(text) => text,
        }
    }
}

impl From<&'static str> for BlockName {
    fn from(text: &'static str) -> Self {
        Self(Text::Static(text))
    }
}

impl From<Arc<str>> for BlockName {
    fn from(text: Arc<str>) -> Self {
        Self(Text::Shared(text))
    }
}

impl From<String> for BlockName {
    fn from(text: String) -> Self {
        Self(Text::Shared(text.into()))
    }
}

impl PartialEq for BlockName {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for BlockName {}

impl PartialEq<str> for BlockName {
    fn eq(&self, other: &str) -> bool {
        **self == *other
    }
}

impl fmt::Display for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for BlockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// What is known of a named block besides the books.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) name: BlockName,
    /// Bytes asked for.
    pub(super) requested: u64,
}

impl Lane {
    /// Names the live block at an address, or names it anew.
    pub(super) fn set_name(&self, addr: Va, requested: u64, name: BlockName) -> Result<()> {
        let mut state = self.state.lock();
        let addr = addr.get();
        let found = state.core.block(addr);
        if found.is_none_or(|b| b.uses == FREED) {
            let inside = found.is_none() && state.core.is_inside(addr);
            return Err(super::block::no_block(Va::new(addr), inside));
        }
        state.core.mark(addr, NAMED);
        state.names.insert(addr, Named { name, requested });
        Ok(())
    }

    /// The name of the live block at an address.
    pub(super) fn name(&self, addr: Va) -> Option<BlockName> {
        let state = self.state.lock();
        state.names.get(&addr.get()).map(|named| named.name.clone())
    }
}

impl State {
    /// Takes the name off the live block at an address, if it has one, so that it can be freed; whether it
    /// had. A block that goes to limbo is still called by its name there.
    #[cold]
    pub(super) fn unname(&mut self, addr: u64) -> bool {
        if self.core.block(addr).is_none_or(|b| b.uses != NAMED) {
            return false;
        }
        self.core.mark(addr, 0);
        if !self.uses.contains_key(&addr) {
            self.names.remove(&addr);
        }
        true
    }
}
