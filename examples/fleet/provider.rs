//! The provider: an HTTP server that holds so many calls at a time, and counts them.
//!
//! It refuses what is too much, as real ones do, and its own count is what the fleet is judged by: a client cannot
//! flatter itself. A call whose client is gone is dropped. It lives in a thread of its own, so that a busy
//! fleet does not slow it down.

use std::{
    convert::Infallible,
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    time::sleep,
};

/// The header by which a process says which one it is: for the allowance of one that is stopped.
pub const WORKER: &str = "x-worker";

/// A call takes so long, in milliseconds.
const LATENCY: std::ops::RangeInclusive<u64> = 100..=500;
/// The longest.
pub const LONGEST: Duration = Duration::from_millis(*LATENCY.end());

/// The server. Dropped, it is gone.
pub struct Provider {
    runtime: Option<Runtime>,
    books: Books,
    pub url: String,
}

/// What it has counted: clones are the same books.
#[derive(Clone)]
pub struct Books(Arc<Mutex<Counts>>);

#[derive(Clone, Debug)]
pub struct Counts {
    /// What it holds at a time.
    pub ceiling: u32,
    /// In flight now,
    pub now: u32,
    /// and at most so far.
    pub peak: u32,
    /// In flight now, by process.
    pub by_worker: Vec<u32>,
    /// Calls that came,
    pub calls: u64,
    /// and those of them that were too many.
    pub refused: u64,
    /// So many more than the ceiling may be in flight now, by what is documented.
    allowance: u32,
    /// By how many that was exceeded, at worst.
    pub excess: u32,
    random: fastrand::Rng,
}

/// A call in flight: until it is dropped.
pub struct Flight {
    books: Books,
    worker: usize,
}

impl Books {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As they are now.
    pub fn read(&self) -> Counts {
        self.lock().clone()
    }

    /// From now on so many calls beyond the ceiling are no breach.
    pub fn allow(&self, calls: u32) {
        self.lock().allowance = calls;
    }

    /// A call is here. How long it takes; none if it is too much.
    pub fn begin(&self, worker: usize) -> (Flight, Option<Duration>) {
        let mut counts = self.lock();
        counts.now += 1;
        counts.calls += 1;
        counts.peak = counts.peak.max(counts.now);
        let held = counts.ceiling + counts.allowance;
        counts.excess = counts.excess.max(counts.now.saturating_sub(held));
        if let Some(own) = counts.by_worker.get_mut(worker) {
            *own += 1;
        }
        let fits = counts.now <= counts.ceiling;
        counts.refused += u64::from(!fits);
        let takes = fits.then(|| Duration::from_millis(counts.random.u64(LATENCY)));
        drop(counts);
        (Flight { books: self.clone(), worker }, takes)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut counts = self.books.lock();
        counts.now -= 1;
        if let Some(own) = counts.by_worker.get_mut(self.worker) {
            *own -= 1;
        }
    }
}

impl Provider {
    /// Serves on a free port.
    pub fn start(ceiling: u32, workers: usize, seed: u64) -> std::io::Result<Self> {
        let books = Books(Arc::new(Mutex::new(Counts {
            ceiling,
            now: 0,
            peak: 0,
            by_worker: vec![0; workers],
            calls: 0,
            refused: 0,
            allowance: 0,
            excess: 0,
            random: fastrand::Rng::with_seed(seed),
        })));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("provider")
            .enable_all()
            .build()?;
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let url = format!("http://{}/v1/complete", listener.local_addr()?);
        let context = runtime.enter();
        runtime.spawn(accept(TcpListener::from_std(listener)?, books.clone()));
        drop(context);
        Ok(Provider { runtime: Some(runtime), books, url })
    }

    pub fn books(&self) -> &Books {
        &self.books
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, books: Books) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve(stream, books.clone()))),
            // No file left to open: others will be closed.
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve(stream: TcpStream, books: Books) {
    stream.set_nodelay(true).ok();
    let handle = service_fn(move |request: Request<Incoming>| {
        let books = books.clone();
        async move { Ok::<_, Infallible>(answer(request, &books).await) }
    });
    // An error here is a client that hung up, or was killed.
    http1::Builder::new().serve_connection(TokioIo::new(stream), handle).await.ok();
}

async fn answer(request: Request<Incoming>, books: &Books) -> Response<Full<Bytes>> {
    let worker = request.headers().get(WORKER).and_then(|value| value.to_str().ok()?.parse().ok());
    request.into_body().collect().await.ok();
    let (_flight, takes) = books.begin(worker.unwrap_or(usize::MAX));
    let Some(takes) = takes else {
        let mut reply = Response::new(Full::from("too many calls at a time"));
        *reply.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        reply.headers_mut().insert("retry-after", 1.into());
        return reply;
    };
    sleep(takes).await;
    Response::new(Full::from("done"))
}
