//! An arena with an element type and a shape that grows along the outermost dimension.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use bytemuck::Pod;

use crate::arena::{Arena, ArenaConfig, Pin};
use crate::pool::Pool;
use crate::stream::Stream;
use crate::units::{Va, VaRange};
use crate::{Error, Result};

/// A dense row-major tensor in device memory whose number of rows grows and shrinks in place. Rows
/// are what the outermost dimension counts; the shape of a row is fixed.
///
/// # Streams
///
/// Operations that take a stream are queued on it, and the tensor remembers the stream: shrinking
/// and dropping wait for its work. Tell it about other streams with [`Arena::record_use`] on
/// [`arena`](Self::arena).
///
/// # Views
///
/// Growing takes `&self` and moves nothing, so views stay valid. Shrinking takes `&mut self`, so a
/// view cannot outlive it:
///
/// ```compile_fail,E0502
/// # use granule::{Device, Pool, PoolConfig, Tensor, driver::sim::SimConfig};
/// # let pool = Pool::new(&Device::sim(SimConfig::default())?, PoolConfig::default())?;
/// let mut tensor = Tensor::<f32>::new(&pool, &[128], 1000)?;
/// tensor.grow(10)?;
/// let view = tensor.view();
/// tensor.shrink(5)?;
/// assert_eq!(view.shape(), [10, 128]);
/// # Ok::<(), granule::Error>(())
/// ```
///
/// The same without the shrink compiles, and the view survives growth:
///
/// ```
/// # use granule::{Device, Pool, PoolConfig, Tensor, driver::sim::SimConfig};
/// # let pool = Pool::new(&Device::sim(SimConfig::default())?, PoolConfig::default())?;
/// let tensor = Tensor::<f32>::new(&pool, &[128], 1000)?;
/// tensor.grow(10)?;
/// let view = tensor.view();
/// tensor.grow(20)?;
/// assert_eq!(view.shape(), [10, 128]);
/// assert_eq!(view.ptr(), tensor.ptr());
/// # Ok::<(), granule::Error>(())
/// ```
pub struct Tensor<T> {
    arena: Arena,
    row_shape: Vec<u64>,
    row_bytes: u64,
    max_rows: u64,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Tensor<T> {
    /// A tensor of no rows that can grow to `max_rows` rows of shape `row_shape` (empty for a
    /// vector of single elements). Reserves addresses and no memory.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if the most bytes do not fit in 64 bits, [`Error::Shape`] if a row or an
    /// element has no bytes, else as [`Arena::with_config`].
    pub fn new(pool: &Pool, row_shape: &[u64], max_rows: u64) -> Result<Self> {
        Self::with_look_ahead(pool, row_shape, max_rows, 0)
    }

    /// As [`new`](Self::new), with that many bytes mapped ahead by the pool's worker; see
    /// [`ArenaConfig::look_ahead`].
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_look_ahead(
        pool: &Pool,
        row_shape: &[u64],
        max_rows: u64,
        look_ahead: u64,
    ) -> Result<Self> {
        let too_large = |requested| Error::TooLarge {
            requested,
            max: u64::MAX / 2,
        };
        let element = size_of::<T>() as u64;
        let mut row_bytes = element;
        for dim in row_shape {
            row_bytes = row_bytes.checked_mul(*dim).ok_or(too_large(*dim))?;
        }
        if row_bytes == 0 {
            return Err(Error::Shape {
                what: "bytes of a row, at least",
                expected: 1,
                got: 0,
            });
        }
        let capacity = row_bytes.checked_mul(max_rows).ok_or(too_large(max_rows))?;
        let config = ArenaConfig::new(capacity).look_ahead(look_ahead);
        Ok(Self {
            arena: Arena::with_config(pool, &config)?,
            row_shape: row_shape.to_vec(),
            row_bytes,
            max_rows,
            element: PhantomData,
        })
    }

    /// The arena underneath.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The address of the first element. Never changes.
    #[must_use]
    pub fn ptr(&self) -> Va {
        self.arena.base()
    }

    /// Rows in use.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.arena.len() / self.row_bytes
    }

    /// The most rows it can grow to.
    #[must_use]
    pub fn max_rows(&self) -> u64 {
        self.max_rows
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Elements of every dimension, the outermost first.
    #[must_use]
    pub fn shape(&self) -> Vec<u64> {
        shape(self.rows(), &self.row_shape)
    }

    /// Elements between neighbours of every dimension, the outermost first.
    #[must_use]
    pub fn strides(&self) -> Vec<u64> {
        strides(&self.row_shape)
    }

    fn bytes_of(&self, rows: u64) -> Result<u64> {
        if rows > self.max_rows {
            return Err(Error::ReservationExhausted {
                asked: rows.saturating_mul(self.row_bytes),
                reserved: self.max_rows * self.row_bytes,
            });
        }
        Ok(rows * self.row_bytes)
    }

    /// Grows to at least `rows` rows; fewer change nothing. What new rows hold: as
    /// [`Arena::grow`].
    ///
    /// # Errors
    ///
    /// As [`Arena::grow`]; the tensor is as before.
    pub fn grow(&self, rows: u64) -> Result<()> {
        self.arena.grow(self.bytes_of(rows)?)
    }

    /// As [`grow`](Self::grow), for rows that `stream` uses first; see [`Arena::grow_on`].
    ///
    /// # Errors
    ///
    /// As [`Arena::grow_on`]; the tensor is as before.
    pub fn grow_on(&self, rows: u64, stream: &Stream) -> Result<()> {
        self.arena.grow_on(self.bytes_of(rows)?, stream)
    }

    /// Grows to at least `rows` rows; new ones are zero for work queued on `stream` afterwards.
    /// Takes `&mut self` so that two growths cannot zero each other's rows.
    ///
    /// # Errors
    ///
    /// As [`Arena::grow_on`], or the driver error of the fill. The number of rows is as before.
    pub fn grow_zeroed(&mut self, rows: u64, stream: &Stream) -> Result<()> {
        let before = self.arena.len();
        let to = self.bytes_of(rows)?;
        self.arena.grow_on(to, stream)?;
        if to <= before {
            return Ok(());
        }
        let fresh = range(self.ptr(), before, to - before)?;
        let filled = self.arena.device().driver().fill(fresh, 0, stream.id());
        if let Err(error) = filled {
            self.arena.truncate(before)?;
            return Err(error.into());
        }
        Ok(())
    }

    /// Shrinks to `rows` rows if there are more and gives memory back; see [`Arena::shrink`].
    ///
    /// # Errors
    ///
    /// As [`Arena::shrink`].
    pub fn shrink(&mut self, rows: u64) -> Result<()> {
        self.arena.shrink(rows.saturating_mul(self.row_bytes))
    }

    /// As [`shrink`](Self::shrink) for a shared tensor: refused while a view or pin reaches past
    /// `rows`.
    ///
    /// # Errors
    ///
    /// [`Error::Pinned`], else as [`Arena::shrink`].
    pub fn try_shrink(&self, rows: u64) -> Result<()> {
        self.arena.try_shrink(rows.saturating_mul(self.row_bytes))
    }

    /// As [`shrink`](Self::shrink), without waiting; see [`Arena::shrink_deferred`].
    ///
    /// # Errors
    ///
    /// As [`Arena::shrink_deferred`].
    pub fn shrink_deferred(&mut self, rows: u64) -> Result<()> {
        self.arena
            .shrink_deferred(rows.saturating_mul(self.row_bytes))
    }

    /// Sets the number of rows and keeps the memory; see [`Arena::truncate`].
    ///
    /// # Errors
    ///
    /// As [`Arena::truncate`].
    pub fn truncate(&mut self, rows: u64) -> Result<()> {
        self.arena.truncate(rows.saturating_mul(self.row_bytes))
    }

    /// Copies whole rows from the host to row `first` and on. Blocks until `rows` may change again.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `rows` is not a whole number of rows, [`Error::OutOfBounds`], or a driver
    /// error; rows in range may then hold anything.
    pub fn copy_from_host(&self, first: u64, rows: &[T], stream: &Stream) -> Result<()> {
        let target = self.span(first, size_of_val(rows) as u64)?;
        let _pin = self.hold_on(target, stream)?;
        if rows.is_empty() {
            return Ok(());
        }
        let bytes = bytemuck::cast_slice(rows);
        let driver = self.arena.device().driver();
        Ok(driver.copy_from_host(target.start(), bytes, stream.id())?)
    }

    /// Copies whole rows from row `first` on to the host, after all earlier work on `stream`. Blocks
    /// until they are there.
    ///
    /// # Errors
    ///
    /// As [`copy_from_host`](Self::copy_from_host); `rows` may then hold anything.
    pub fn copy_to_host(&self, first: u64, rows: &mut [T], stream: &Stream) -> Result<()> {
        let source = self.span(first, size_of_val(rows) as u64)?;
        let _pin = self.hold_on(source, stream)?;
        if rows.is_empty() {
            return Ok(());
        }
        let bytes = bytemuck::cast_slice_mut(rows);
        let driver = self.arena.device().driver();
        Ok(driver.copy_to_host(bytes, source, stream.id())?)
    }

    /// Queues a fill of some rows with zero bytes.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] or a driver error.
    pub fn zero(&self, rows: impl RangeBounds<u64>, stream: &Stream) -> Result<()> {
        let (first, count) = self.resolve(rows)?;
        let target = self.span(first, count * self.row_bytes)?;
        let _pin = self.hold_on(target, stream)?;
        if target.is_empty() {
            return Ok(());
        }
        let driver = self.arena.device().driver();
        Ok(driver.fill(target, 0, stream.id())?)
    }

    /// Keeps the range mapped while a call is made, and remembers the stream.
    fn hold_on(&self, range: VaRange, stream: &Stream) -> Result<Pin> {
        self.arena.record_use(stream)?;
        let offset = range.start().checked_offset_from(self.ptr()).unwrap_or(0);
        self.arena.pin(offset, range.len())
    }

    /// `bytes` from row `first` on; whole rows in use.
    fn span(&self, first: u64, bytes: u64) -> Result<VaRange> {
        if !bytes.is_multiple_of(self.row_bytes) {
            return Err(Error::Shape {
                what: "bytes of the last row",
                expected: self.row_bytes,
                got: bytes % self.row_bytes,
            });
        }
        let offset = first.saturating_mul(self.row_bytes);
        let end = self.arena.len();
        match offset.checked_add(bytes) {
            Some(last) if last <= end => range(self.ptr(), offset, bytes),
            _ => Err(Error::OutOfBounds {
                offset,
                len: bytes,
                end,
            }),
        }
    }

    /// First row and number of rows of a range, checked.
    fn resolve(&self, rows: impl RangeBounds<u64>) -> Result<(u64, u64)> {
        let all = self.rows();
        let first = match rows.start_bound() {
            Bound::Included(row) => *row,
            Bound::Excluded(row) => row.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match rows.end_bound() {
            Bound::Included(row) => row.saturating_add(1),
            Bound::Excluded(row) => *row,
            Bound::Unbounded => all,
        };
        if first > end || end > all {
            return Err(Error::OutOfBounds {
                offset: first.saturating_mul(self.row_bytes),
                len: end.saturating_sub(first).saturating_mul(self.row_bytes),
                end: all * self.row_bytes,
            });
        }
        Ok((first, end - first))
    }

    /// All rows in use now.
    #[must_use]
    pub fn view(&self) -> TensorView<'_, T> {
        loop {
            // A shrink between the two steps makes the range too long; it is then asked for again.
            if let Ok(view) = self.rows_view(..self.rows()) {
                return view;
            }
        }
    }

    /// Some rows.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn rows_view(&self, rows: impl RangeBounds<u64>) -> Result<TensorView<'_, T>> {
        let (first, count) = self.resolve(rows)?;
        let pin = self
            .arena
            .pin(first * self.row_bytes, count * self.row_bytes)?;
        Ok(TensorView {
            pin,
            rows: count,
            tensor: self,
        })
    }

    /// Some rows, kept mapped for as long as the view lives, even past the tensor: for other
    /// threads. [`try_shrink`](Self::try_shrink) is refused meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn shared_view(self: &Arc<Self>, rows: impl RangeBounds<u64>) -> Result<SharedView<T>> {
        let (first, count) = self.resolve(rows)?;
        let pin = self
            .arena
            .pin(first * self.row_bytes, count * self.row_bytes)?;
        Ok(SharedView {
            pin,
            rows: count,
            tensor: self.clone(),
        })
    }

    /// Gives everything back and reports what went wrong; see [`Arena::close`].
    ///
    /// # Errors
    ///
    /// As [`Arena::close`].
    pub fn close(self) -> Result<(), (Self, Error)> {
        let Self {
            arena,
            row_shape,
            row_bytes,
            max_rows,
            element,
        } = self;
        arena.close().map_err(|(arena, error)| {
            let tensor = Self {
                arena,
                row_shape,
                row_bytes,
                max_rows,
                element,
            };
            (tensor, error)
        })
    }
}

impl<T> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("arena", &self.arena)
            .field("row_shape", &self.row_shape)
            .finish_non_exhaustive()
    }
}

macro_rules! view_methods {
    () => {
        /// The address of the first element.
        #[must_use]
        pub fn ptr(&self) -> Va {
            self.pin.range().start()
        }

        /// The addresses.
        #[must_use]
        pub fn range(&self) -> VaRange {
            self.pin.range()
        }

        /// Elements of every dimension, the outermost first.
        #[must_use]
        pub fn shape(&self) -> Vec<u64> {
            shape(self.rows, &self.tensor.row_shape)
        }

        /// Elements between neighbours of every dimension, the outermost first.
        #[must_use]
        pub fn strides(&self) -> Vec<u64> {
            strides(&self.tensor.row_shape)
        }

        /// Number of elements.
        #[must_use]
        pub fn elements(&self) -> u64 {
            self.pin.range().len() / size_of::<T>() as u64
        }
    };
}

/// Rows of a [`Tensor`], borrowed from it: stays valid while the tensor grows, and keeps it from
/// shrinking.
pub struct TensorView<'a, T> {
    pin: Pin,
    rows: u64,
    tensor: &'a Tensor<T>,
}

impl<T: Pod> TensorView<'_, T> {
    view_methods!();

    /// The tensor that the rows are of.
    #[must_use]
    pub fn tensor(&self) -> &Tensor<T> {
        self.tensor
    }
}

/// Rows of a shared [`Tensor`] that stay mapped as long as the view lives.
pub struct SharedView<T> {
    pin: Pin,
    rows: u64,
    tensor: Arc<Tensor<T>>,
}

impl<T: Pod> SharedView<T> {
    view_methods!();

    /// The tensor that the rows are of.
    #[must_use]
    pub fn tensor(&self) -> &Arc<Tensor<T>> {
        &self.tensor
    }
}

impl<T> fmt::Debug for TensorView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorView({} rows, {})", self.rows, self.pin.range())
    }
}

impl<T> fmt::Debug for SharedView<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedView({} rows, {})", self.rows, self.pin.range())
    }
}

fn range(base: Va, offset: u64, len: u64) -> Result<VaRange> {
    let start = base.checked_add(offset);
    let range = start.and_then(|start| VaRange::new(start, len));
    range.ok_or(Error::OutOfBounds {
        offset,
        len,
        end: u64::MAX - base.get(),
    })
}

fn shape(rows: u64, row_shape: &[u64]) -> Vec<u64> {
    std::iter::once(rows)
        .chain(row_shape.iter().copied())
        .collect()
}

fn strides(row_shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; row_shape.len() + 1];
    for i in (0..row_shape.len()).rev() {
        strides[i] = strides[i + 1] * row_shape[i];
    }
    strides
}
