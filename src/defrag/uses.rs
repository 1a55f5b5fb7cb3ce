//! Which streams may still use some bytes. Streams are remembered, events are not taken, until
//! memory is about to change hands.

use crate::Result;
use crate::stream::{Fence, Stream};

/// A few distinct streams; nearly always one.
#[derive(Clone, Default, Debug)]
pub(super) struct Uses {
    first: Option<Stream>,
    others: Vec<Stream>,
}

impl Uses {
    pub(super) fn of(stream: &Stream) -> Self {
        Self {
            first: Some(stream.clone()),
            others: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, stream: &Stream) {
        match &self.first {
            None => self.first = Some(stream.clone()),
            Some(first) if first == stream || self.others.contains(stream) => {}
            Some(_) => self.others.push(stream.clone()),
        }
    }

    pub(super) fn join(&mut self, other: &Self) {
        other.iter().for_each(|stream| self.add(stream));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Stream> {
        self.first.iter().chain(&self.others)
    }

    /// Makes `stream` wait on the device for all work that the others have queued.
    pub(super) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let mut others = self.iter().filter(|other| *other != stream);
        others.try_for_each(|other| stream.wait(&other.fence()?))
    }

    /// A fence behind the work that each has queued.
    pub(super) fn fences(&self) -> Result<Fences> {
        self.iter().map(Stream::fence).collect()
    }
}

/// A few fences; nearly always one, so that no vector is made for it.
#[derive(Default, Debug)]
pub(super) struct Fences {
    first: Option<Fence>,
    others: Vec<Fence>,
}

impl Fences {
    /// The fence, if it is the only one.
    pub(super) fn single(&self) -> Option<&Fence> {
        self.first.as_ref().filter(|_| self.others.is_empty())
    }

    /// Whether all have passed. What cannot be asked has not, and what has is not asked again.
    pub(super) fn have_passed(&mut self) -> bool {
        let has = |fence: Option<&Fence>| fence.is_none_or(|f| f.is_done().unwrap_or(false));
        while has(self.others.last()) {
            if self.others.pop().is_none() {
                let passed = has(self.first.as_ref());
                self.first.take_if(|_| passed);
                return passed;
            }
        }
        false
    }
}

impl FromIterator<Fence> for Fences {
    fn from_iter<I: IntoIterator<Item = Fence>>(fences: I) -> Self {
        let mut fences = fences.into_iter();
        Self {
            first: fences.next(),
            others: fences.collect(),
        }
    }
}
