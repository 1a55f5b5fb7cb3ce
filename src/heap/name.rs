//! Names of blocks: kept beside the books, so that blocks without one pay nothing.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::block::no_block;
use super::lane::{Lane, State};
use crate::Result;
use crate::units::Va;

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
    /// Names the owned block at an address, or names it anew.
    pub(super) fn set_name(&self, addr: Va, requested: u64, name: BlockName) -> Result<()> {
        let mut state = self.state.lock();
        if state.core.block(addr.get()).is_none_or(|b| b.uses != 0) {
            return Err(no_block(addr, false));
        }
        state.names.insert(addr.get(), Named { name, requested });
        Ok(())
    }

    /// The name of the live block at an address.
    pub(super) fn name(&self, addr: Va) -> Option<BlockName> {
        let state = self.state.lock();
        state.names.get(&addr.get()).map(|named| named.name.clone())
    }
}

impl State {
    /// Takes the name off the block at an address, if it has one. A block that goes to limbo is still
    /// called by its name there.
    #[inline]
    pub(super) fn unname(&mut self, addr: u64) {
        if !self.names.is_empty() {
            self.names.remove(&addr);
        }
    }

    /// Names whose blocks are neither live nor in limbo: there are none.
    pub(super) fn orphaned_names(&self) -> u64 {
        let is_orphan =
            |addr: u64| self.live(addr).is_none() && !self.limbo.iter().any(|one| one.addr == addr);
        self.names.keys().filter(|addr| is_orphan(**addr)).count() as u64
    }
}
