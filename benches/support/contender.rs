//! Ways of having a contiguous buffer that grows: in place, and by allocate, copy, free as
//! `torch.cat` does, over whatever allocates. For benches and examples alike.

use granule::driver::cuda::CudaDriver;
use granule::driver::{Access, DriverResult, GranuleProps, PhysId, SharedDriver};
use granule::units::{Va, VaRange, round_up};
use granule::{Arena, ArenaConfig, Device, Pool, PoolConfig, Result, Stream};

/// A contiguous buffer that grows.
pub trait Contender {
    /// What it is called in tables.
    fn name(&self) -> &'static str;

    /// Makes the buffer `to` bytes long, old bytes kept, for work queued on the stream afterwards.
    fn enlarge(&mut self, to: u64) -> Result<VaRange>;

    /// Gives back what [`enlarge`](Self::enlarge) left over, if anything. Called after the new
    /// bytes were queued to be written.
    fn settle(&mut self) -> Result<()>;

    /// Bytes copied so far.
    fn copied(&self) -> u64;

    /// Gives everything back.
    fn close(self: Box<Self>) -> Result<()>;
}

/// All contenders that the device's driver can run; this crate's comes first.
pub fn all(device: &Device, stream: &Stream, most: u64) -> Result<Vec<Box<dyn Contender>>> {
    let mut list: Vec<Box<dyn Contender>> = vec![Box::new(InPlace::new(device, stream, most, 0)?)];
    list.push(Box::new(Cat::new(
        "fresh mapping, copy",
        Fresh(device.driver().clone()),
        stream,
    )));
    if cuda(device).is_some() {
        let plain = Plain(device.clone());
        list.push(Box::new(Cat::new("cuMemAlloc, copy", plain, stream)));
        let ordered = Ordered(device.clone());
        list.push(Box::new(Cat::new("cuMemAllocAsync, copy", ordered, stream)));
    }
    Ok(list)
}

/// The concrete CUDA driver, if that is what the device has.
pub fn cuda(device: &Device) -> Option<&CudaDriver> {
    device.driver().as_any().downcast_ref()
}

/// This crate: one arena.
pub struct InPlace {
    /// The arena.
    pub arena: Arena,
    stream: Stream,
}

impl InPlace {
    /// An empty arena of a pool of its own.
    pub fn new(device: &Device, stream: &Stream, most: u64, look_ahead: u64) -> Result<Self> {
        let pool = Pool::new(device, PoolConfig::with_budget(most))?;
        let config = ArenaConfig::new(most).look_ahead(look_ahead);
        Ok(Self {
            arena: Arena::with_config(&pool, &config)?,
            stream: stream.clone(),
        })
    }
}

impl Contender for InPlace {
    fn name(&self) -> &'static str {
        "granule, in place"
    }

    fn enlarge(&mut self, to: u64) -> Result<VaRange> {
        self.arena.grow_on(to, &self.stream)?;
        Ok(self.arena.range())
    }

    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    fn copied(&self) -> u64 {
        0
    }

    fn close(self: Box<Self>) -> Result<()> {
        let pool = self.arena.pool().clone();
        self.arena.close().map_err(|(_, error)| error)?;
        pool.trim(0).map(drop)
    }
}

/// Something that allocates contiguous memory.
pub trait Source {
    /// What one allocation is known by.
    type Block: Copy;

    /// Memory that work queued on `stream` afterwards may use.
    fn alloc(&self, len: u64, stream: &Stream) -> DriverResult<(Self::Block, VaRange)>;

    /// Gives it back once the work queued on `stream` so far is done.
    fn free(&self, block: Self::Block, at: VaRange, stream: &Stream) -> DriverResult<()>;
}

/// Allocate, copy, free.
pub struct Cat<S: Source> {
    name: &'static str,
    source: S,
    stream: Stream,
    now: Option<(S::Block, VaRange)>,
    old: Option<(S::Block, VaRange)>,
    copied: u64,
}

impl<S: Source> Cat<S> {
    /// An empty buffer.
    pub fn new(name: &'static str, source: S, stream: &Stream) -> Self {
        Self {
            name,
            source,
            stream: stream.clone(),
            now: None,
            old: None,
            copied: 0,
        }
    }
}

impl<S: Source> Contender for Cat<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn enlarge(&mut self, to: u64) -> Result<VaRange> {
        let (block, range) = self.source.alloc(to, &self.stream)?;
        if let Some((_, old)) = self.now {
            let driver = self.stream.device().driver();
            driver.copy(range.start(), old, self.stream.id())?;
            self.copied += old.len();
        }
        self.old = self.now.replace((block, range));
        Ok(range)
    }

    fn settle(&mut self) -> Result<()> {
        match self.old.take() {
            Some((block, range)) => Ok(self.source.free(block, range, &self.stream)?),
            None => Ok(()),
        }
    }

    fn copied(&self) -> u64 {
        self.copied
    }

    fn close(mut self: Box<Self>) -> Result<()> {
        self.settle()?;
        if let Some((block, range)) = self.now.take() {
            self.source.free(block, range, &self.stream)?;
        }
        self.stream.synchronize()
    }
}

/// A fresh reservation with one fresh granule for every size, on any driver.
pub struct Fresh(pub SharedDriver);

impl Source for Fresh {
    type Block = (PhysId, VaRange);

    fn alloc(&self, len: u64, _: &Stream) -> DriverResult<(Self::Block, VaRange)> {
        let whole = round_up(len, self.0.info().granularity).unwrap_or(len);
        let phys = self.0.create(whole, GranuleProps::default())?;
        let range = self.0.reserve(whole, 0)?;
        self.0.map(range, phys)?;
        self.0.set_access(range, Access::ReadWrite)?;
        let used = range.sub(0, len).unwrap_or(range);
        Ok(((phys, range), used))
    }

    fn free(&self, (phys, range): Self::Block, _: VaRange, stream: &Stream) -> DriverResult<()> {
        self.0.sync_stream(stream.id())?;
        self.0.unmap(range)?;
        self.0.free_reservation(range)?;
        self.0.release(phys)
    }
}

/// `cuMemAlloc` and `cuMemFree`, which waits for the device by itself.
pub struct Plain(pub Device);

impl Source for Plain {
    type Block = Va;

    fn alloc(&self, len: u64, _: &Stream) -> DriverResult<(Va, VaRange)> {
        let at = extras(&self.0)?.mem_alloc(len)?;
        Ok((at, VaRange::new(at, len).unwrap_or(VaRange::EMPTY)))
    }

    fn free(&self, at: Va, _: VaRange, _: &Stream) -> DriverResult<()> {
        extras(&self.0)?.mem_free(at)
    }
}

/// `cuMemAllocAsync` and `cuMemFreeAsync` from the device's default pool.
pub struct Ordered(pub Device);

impl Source for Ordered {
    type Block = Va;

    fn alloc(&self, len: u64, stream: &Stream) -> DriverResult<(Va, VaRange)> {
        let at = extras(&self.0)?.mem_alloc_async(len, stream.id())?;
        Ok((at, VaRange::new(at, len).unwrap_or(VaRange::EMPTY)))
    }

    fn free(&self, at: Va, _: VaRange, stream: &Stream) -> DriverResult<()> {
        extras(&self.0)?.mem_free_async(at, stream.id())
    }
}

fn extras(device: &Device) -> DriverResult<&CudaDriver> {
    use granule::driver::{Call, DriverCode, DriverError};
    cuda(device).ok_or(DriverError::new(Call::Create, DriverCode::NOT_SUPPORTED))
}
