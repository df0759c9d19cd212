//! Captured graphs: what the host enqueues, recorded once and repeated with one call.
//!
//! ```text
//! begin_capture -> ops: recorded, none is done -> end_capture -> repeat -> repeat -> ..
//! ```
//! A graph names addresses and the numbers that were given to kernels. So it is good only for ops
//! that would be enqueued with the same ones again, and only as long as what lies there stays
//! there. A device keeps its graphs itself: when memory that they name goes, they go with it, and
//! [`CudaDevice::repeat`] says that there is none.
//!
//! What passes between host and device is in no graph: a graph would repeat the copy and not the
//! bytes. Nor is anything that kernels and memory are made for. Who asks for either while ops are
//! recorded spoils the capture, and not the device.

use std::sync::OnceLock;

use cudarc::driver::{result as cu, sys};

use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::{CudaError, Doing};
use crate::error::LayerError;

/// A list of launches that starts as one.
#[derive(Debug)]
pub struct Graph {
    executable: sys::CUgraphExec,
    launches: usize,
    _gpu: Gpu,
}

impl Graph {
    /// Kernels and copies in it.
    pub fn launches(&self) -> usize {
        self.launches
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by us, destroyed once; one that runs is destroyed when it is done.
        let _ = unsafe { cu::graph::exec_destroy(self.executable) };
    }
}

/// What was recorded, before it can be launched.
struct Template(sys::CUgraph);

impl Template {
    fn graph(&self, gpu: &Gpu) -> Result<Graph, CudaError> {
        let what = || "making a graph of what was captured".to_owned();
        let mut launches = 0;
        // SAFETY: the template is valid; without an array the call only counts.
        unsafe { sys::cuGraphGetNodes(self.0, std::ptr::null_mut(), &mut launches) }
            .result()
            .doing(what)?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the template is valid; what is made of it does not need it afterwards.
        let executable = unsafe { cu::graph::instantiate(self.0, flags) }.doing(what)?;
        Ok(Graph { executable, launches, _gpu: gpu.clone() })
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: it came of a capture that has ended, and is destroyed once.
        let _ = unsafe { cu::graph::destroy(self.0) };
    }
}

impl Stream {
    /// Records what `enqueue` enqueues on this stream, to be launched as one.
    pub fn capture<E: From<CudaError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.begin_capture()?;
        let enqueued = enqueue();
        let template = self.end_capture();
        enqueued?;
        Ok(template?.graph(self.gpu())?)
    }

    /// From here on this thread records what it enqueues on this stream.
    fn begin_capture(&self) -> Result<(), CudaError> {
        // What other threads do meanwhile (memory that is registered, for example) is theirs.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is valid; who calls this ends the capture on every path.
        unsafe { cu::stream::begin_capture(self.handle(), mode) }
            .doing(|| "beginning to capture a graph".to_owned())
    }

    /// Ends the capture, also one that was spoiled.
    fn end_capture(&self) -> Result<Template, CudaError> {
        // SAFETY: the capture was begun on the same stream and thread.
        let ended = unsafe { cu::stream::end_capture(self.handle()) };
        Ok(Template(ended.doing(|| "capturing a graph".to_owned())?))
    }

    pub fn launch_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both handles are valid.
        unsafe { cu::graph::launch(graph.executable, self.handle()) }
            .doing(|| "launching a graph".to_owned())
    }
}

/// A graph of a device, of no device by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    at: usize,
    era: u64,
    launches: usize,
}

impl Captured {
    /// Kernels and copies in it.
    pub fn launches(&self) -> usize {
        self.launches
    }
}

/// The graphs of a device, and the one that is being recorded.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: Vec<Graph>,
    /// How often all of them were given up. One that no device has made is of the first, which a
    /// device leaves when it is given its arena.
    era: u64,
    /// Ops are recorded.
    pub(crate) open: bool,
    /// Why the capture that is open was spoiled.
    pub(crate) spoiled: OnceLock<LayerError>,
}

impl CudaDevice {
    /// From here to [`CudaDevice::end_capture`] ops are recorded and not done.
    ///
    /// # Errors
    /// Nothing is recorded: the device refuses, or it has failed before.
    pub fn begin_capture(&mut self) -> Result<(), LayerError> {
        assert!(!self.graphs.open, "one at a time");
        if self.check().is_err() {
            let why = "the device has failed".to_owned();
            return Err(CudaError::NotCaptured { why }.into());
        }
        self.gpu().make_current()?;
        self.stream.begin_capture()?;
        self.graphs.open = true;
        Ok(())
    }

    /// The graph of what was enqueued since [`CudaDevice::begin_capture`]. None of it was done.
    ///
    /// # Errors
    /// It cannot be a graph. The device is as it was before, and ops are done again.
    pub fn end_capture(&mut self) -> Result<Captured, LayerError> {
        assert!(std::mem::take(&mut self.graphs.open), "a capture was begun");
        let template = self.stream.end_capture();
        // The first reason says most; the driver only knows that there was one.
        if let Some(why) = self.graphs.spoiled.take() {
            return Err(why);
        }
        let graph = template?.graph(self.gpu())?;
        let (at, era, launches) = (self.graphs.graphs.len(), self.graphs.era, graph.launches());
        self.graphs.graphs.push(graph);
        Ok(Captured { at, era, launches })
    }

    /// Enqueues all of a graph; false: it was given up, and nothing was enqueued.
    pub fn repeat(&mut self, captured: &Captured) -> bool {
        if captured.era != self.graphs.era {
            return false;
        }
        assert!(!self.graphs.open, "a graph in a graph");
        self.attempt(|| Ok(self.stream.launch_graph(&self.graphs.graphs[captured.at])?));
        true
    }

    /// Gives all graphs up. What of them is enqueued is done all the same.
    pub fn forget_captured(&mut self) {
        self.graphs.graphs.clear();
        self.graphs.era += 1;
    }

    /// [`CudaDevice::attempt`] of what a graph cannot hold.
    pub(crate) fn attempt_outside(
        &self,
        what: &'static str,
        enqueue: impl FnOnce() -> Result<(), LayerError>,
    ) {
        self.attempt(|| match self.graphs.open {
            true => Err(CudaError::NotCaptured { why: format!("{what} is in no graph") }.into()),
            false => enqueue(),
        });
    }
}
