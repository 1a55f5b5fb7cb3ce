//! Which streams may still use some bytes. Streams are remembered, events are not taken, until
//! memory is about to change hands.

use crate::Result;
use crate::stream::{Fence, Stream};

/// A few distinct streams.
#[derive(Clone, Default, Debug)]
pub(super) struct Uses(Vec<Stream>);

impl Uses {
    pub(super) fn of(stream: &Stream) -> Self {
        Self(vec![stream.clone()])
    }

    pub(super) fn add(&mut self, stream: &Stream) {
        if !self.0.contains(stream) {
            self.0.push(stream.clone());
        }
    }

    pub(super) fn join(&mut self, other: &Self) {
        other.0.iter().for_each(|stream| self.add(stream));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Stream> {
        self.0.iter()
    }

    /// Makes `stream` wait on the device for all work that the others have queued.
    pub(super) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let mut others = self.0.iter().filter(|other| *other != stream);
        others.try_for_each(|other| stream.wait(&other.fence()?))
    }

    /// A fence behind the work that each has queued.
    pub(super) fn fences(&self) -> Result<Vec<Fence>> {
        self.0.iter().map(Stream::fence).collect()
    }
}
