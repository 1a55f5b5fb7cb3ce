//! The address line: every unit of a lane's range is in exactly one node (live, free, gap or busy), and the
//! nodes are linked in address order, so that neighbours are links and coalescing is constant time.
//!
//! Free runs lie over mapped memory only and span granules. A gap has nothing mapped. A busy piece belongs to a
//! plan under way, or to an alias that still waits for its unmap.

use super::NONE;
use super::index::Index;
use super::lane::Uses;

/// What a node stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In the slab's list of unused nodes.
    Vacant,
    /// A block.
    Live,
    /// Mapped and free.
    Free,
    /// Not mapped.
    Gap,
    /// Held by a plan or by a stale alias.
    Busy,
}

/// A piece of the line. 32 bytes, two to a cache line and none across two.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub struct Node {
    /// First unit.
    pub start: u32,
    /// Units.
    pub len: u32,
    /// The piece before, or `NONE`.
    pub prev: u32,
    /// The piece after, or `NONE`.
    pub next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    /// Who else may still use this memory: the caller's value, 0 for nobody.
    pub uses: u32,
    /// What it stands for.
    pub state: State,
}

/// Who may still use memory that both `a` and `b` may: the caller is asked only if both say something.
#[inline]
fn joined(rule: &mut impl Uses, a: u32, b: u32) -> u32 {
    if a == b || b == 0 {
        a
    } else if a == 0 {
        b
    } else {
        rule.join(a, b)
    }
}

/// The pieces of one range of addresses.
#[derive(Debug)]
pub struct Line {
    nodes: Vec<Node>,
    vacant: u32,
    gaps: u32,
    index: Index,
}

impl Line {
    /// A line of `len` units, all gap.
    pub fn new(len: u32, index: Index) -> Self {
        let first = Node {
            start: 0,
            len,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
            uses: 0,
            state: State::Gap,
        };
        Self {
            nodes: vec![first],
            vacant: NONE,
            gaps: 0,
            index,
        }
    }

    /// The node `at`.
    #[inline]
    pub fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    /// Sets who else may use a piece.
    #[inline]
    pub fn set_uses(&mut self, at: u32, uses: u32) {
        self.nodes[at as usize].uses = uses;
    }

    /// A free run of at least `len` units.
    #[inline]
    pub fn find(&mut self, len: u32) -> Option<u32> {
        self.index.find(&self.nodes, len)
    }

    /// Calls `see` with every free run of at least `len` units.
    pub fn each_run(&self, len: u32, see: &mut dyn FnMut(u32)) {
        self.index.each(&self.nodes, len, see);
    }

    /// All nodes, vacant ones too.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The first of the gaps; the others follow by `next_gap`.
    pub fn first_gap(&self) -> u32 {
        self.gaps
    }

    /// The gap after this one in the list of gaps (in no order), or `NONE`.
    pub fn next_gap(&self, gap: u32) -> u32 {
        self.node(gap).bin_next
    }

    #[inline]
    fn fresh(&mut self, node: Node) -> u32 {
        let at = self.vacant;
        if at == NONE {
            let at = self.nodes.len() as u32;
            self.nodes.push(node);
            return at;
        }
        self.vacant = self.nodes[at as usize].bin_next;
        self.nodes[at as usize] = node;
        at
    }

    /// Unlinks a node from the line and returns it to the slab.
    #[inline]
    fn drop_node(&mut self, at: u32) {
        let Node { prev, next, .. } = self.nodes[at as usize];
        if prev != NONE {
            self.nodes[prev as usize].next = next;
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        self.nodes[at as usize].state = State::Vacant;
        self.nodes[at as usize].bin_next = self.vacant;
        self.vacant = at;
    }

    /// Inserts a new node before `at`.
    #[inline]
    fn insert_before(&mut self, at: u32, start: u32, len: u32, uses: u32, state: State) -> u32 {
        let prev = self.nodes[at as usize].prev;
        let new = self.fresh(Node {
            start,
            len,
            prev,
            next: at,
            bin_prev: NONE,
            bin_next: NONE,
            uses,
            state,
        });
        self.nodes[at as usize].prev = new;
        if prev != NONE {
            self.nodes[prev as usize].next = new;
        }
        new
    }

    #[inline]
    fn insert_after(&mut self, at: u32, start: u32, len: u32, uses: u32, state: State) -> u32 {
        let next = self.nodes[at as usize].next;
        let new = self.fresh(Node {
            start,
            len,
            prev: at,
            next,
            bin_prev: NONE,
            bin_next: NONE,
            uses,
            state,
        });
        self.nodes[at as usize].next = new;
        if next != NONE {
            self.nodes[next as usize].prev = new;
        }
        new
    }

    fn link_gap(&mut self, gap: u32) {
        let head = self.gaps;
        if head != NONE {
            self.nodes[head as usize].bin_prev = gap;
        }
        self.nodes[gap as usize].bin_prev = NONE;
        self.nodes[gap as usize].bin_next = head;
        self.gaps = gap;
    }

    fn unlink_gap(&mut self, gap: u32) {
        let Node {
            bin_prev, bin_next, ..
        } = self.nodes[gap as usize];
        if bin_next != NONE {
            self.nodes[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            self.nodes[bin_prev as usize].bin_next = bin_next;
        } else {
            self.gaps = bin_next;
        }
    }

    /// Takes `[start, start + len)` out of a free run as a block; what is left of the run stays free.
    #[inline]
    pub fn take(&mut self, run: u32, start: u32, len: u32) -> u32 {
        let Node {
            start: from,
            len: all,
            uses,
            ..
        } = self.nodes[run as usize];
        let tail = (from + all) - (start + len);
        if start == from {
            if tail == 0 {
                self.index.remove(&mut self.nodes, run);
                self.nodes[run as usize].state = State::Live;
                return run;
            }
            self.index.resize(&mut self.nodes, run, start + len, tail);
            return self.insert_before(run, start, len, uses, State::Live);
        }
        self.index.resize(&mut self.nodes, run, from, start - from);
        let block = self.insert_after(run, start, len, uses, State::Live);
        if tail > 0 {
            let rest = self.insert_after(block, start + len, tail, uses, State::Free);
            self.index.insert(&mut self.nodes, rest);
        }
        block
    }

    /// Frees a live or busy piece: joins it with free neighbours, whose uses are joined. Returns the run.
    #[inline]
    pub fn give(&mut self, block: u32, uses_rule: &mut impl Uses) -> u32 {
        let Node {
            start,
            len,
            prev,
            next,
            uses,
            ..
        } = self.nodes[block as usize];
        let before = prev != NONE && self.nodes[prev as usize].state == State::Free;
        let after = next != NONE && self.nodes[next as usize].state == State::Free;
        if !before && !after {
            self.nodes[block as usize].state = State::Free;
            self.index.insert(&mut self.nodes, block);
            return block;
        }
        let (run, mut from, mut all) = if before {
            (prev, self.nodes[prev as usize].start, len)
        } else {
            (next, start, len)
        };
        if before {
            all += self.nodes[prev as usize].len;
        }
        if after {
            all += self.nodes[next as usize].len;
        }
        let mut mark = uses;
        if before {
            mark = joined(uses_rule, self.nodes[prev as usize].uses, mark);
        }
        if after {
            mark = joined(uses_rule, mark, self.nodes[next as usize].uses);
        }
        self.drop_node(block);
        if before && after {
            self.index.remove(&mut self.nodes, next);
            self.drop_node(next);
        }
        from = from.min(start);
        self.nodes[run as usize].uses = mark;
        self.index.resize(&mut self.nodes, run, from, all);
        run
    }

    /// Takes `[start, start + len)` out of a gap as a busy piece.
    pub fn claim_gap(&mut self, gap: u32, start: u32, len: u32) -> u32 {
        let Node {
            start: from,
            len: all,
            ..
        } = self.nodes[gap as usize];
        let tail = (from + all) - (start + len);
        if start == from && tail == 0 {
            self.unlink_gap(gap);
            self.nodes[gap as usize].state = State::Busy;
            return gap;
        }
        if start == from {
            self.nodes[gap as usize].start = start + len;
            self.nodes[gap as usize].len = tail;
            return self.insert_before(gap, start, len, 0, State::Busy);
        }
        self.nodes[gap as usize].len = start - from;
        let piece = self.insert_after(gap, start, len, 0, State::Busy);
        if tail > 0 {
            let rest = self.insert_after(piece, start + len, tail, 0, State::Gap);
            self.link_gap(rest);
        }
        piece
    }

    /// Takes `[start, start + len)` out of a free run as a busy piece.
    pub fn claim_run(&mut self, run: u32, start: u32, len: u32) -> u32 {
        let piece = self.take(run, start, len);
        self.nodes[piece as usize].state = State::Busy;
        piece
    }

    /// Makes a busy piece a gap and joins it with the gaps beside it.
    pub fn give_gap(&mut self, piece: u32) -> u32 {
        let Node { prev, next, .. } = self.nodes[piece as usize];
        self.nodes[piece as usize].state = State::Gap;
        self.nodes[piece as usize].uses = 0;
        if next != NONE && self.nodes[next as usize].state == State::Gap {
            self.unlink_gap(next);
            self.nodes[piece as usize].len += self.nodes[next as usize].len;
            self.drop_node(next);
        }
        if prev != NONE && self.nodes[prev as usize].state == State::Gap {
            self.nodes[prev as usize].len += self.nodes[piece as usize].len;
            self.drop_node(piece);
            return prev;
        }
        self.link_gap(piece);
        piece
    }

    /// Joins the busy pieces from `first` through `last` into one busy piece.
    pub fn join_busy(&mut self, first: u32, last: u32, uses_rule: &mut impl Uses) -> u32 {
        let mut joined_to = first;
        while joined_to != last {
            let Node { next, .. } = self.nodes[first as usize];
            let Node { len, uses, .. } = self.nodes[next as usize];
            self.nodes[first as usize].len += len;
            self.nodes[first as usize].uses =
                joined(uses_rule, self.nodes[first as usize].uses, uses);
            self.drop_node(next);
            joined_to = next;
        }
        first
    }

    /// Makes a busy piece a block of its first part from `start`, `len` long; the ends become free runs.
    pub fn settle(&mut self, piece: u32, start: u32, len: u32, uses_rule: &mut impl Uses) -> u32 {
        let Node {
            start: from,
            len: all,
            uses,
            ..
        } = self.nodes[piece as usize];
        let tail = (from + all) - (start + len);
        self.nodes[piece as usize].state = State::Live;
        self.nodes[piece as usize].start = start;
        self.nodes[piece as usize].len = len;
        if start > from {
            let head = self.insert_before(piece, from, start - from, uses, State::Busy);
            self.give(head, uses_rule);
        }
        if tail > 0 {
            let rest = self.insert_after(piece, start + len, tail, uses, State::Busy);
            self.give(rest, uses_rule);
        }
        piece
    }
}
