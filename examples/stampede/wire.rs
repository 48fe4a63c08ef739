//! The HTTP client that both policies use, with a book of what was sent.
//!
//! The book is for the progress display, and for the figures where the servers are the reader's own.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, Error, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::Instant;
use tower::Service;
use tower_herd_sim::provider::{CallRecord, Outcome};

/// A completion to be made: a JSON POST.
pub type Completion = Request<Full<Bytes>>;

/// hyper-util's client.
#[derive(Clone)]
pub struct Wire {
    client: Client<HttpConnector, Full<Bytes>>,
    book: Arc<Book>,
}

/// What was sent to each rung.
pub struct Book {
    started: Instant,
    rungs: Vec<Page>,
}

/// What was sent to one rung.
#[derive(Default)]
pub struct Page {
    calls: Mutex<Vec<CallRecord>>,
    pub sent: AtomicU64,
    pub in_flight: AtomicU64,
    pub throttled: AtomicU64,
}

/// The rung that a request goes to, in its extensions.
#[derive(Clone, Copy)]
struct To(usize);

/// Which task a request belongs to, in its extensions.
#[derive(Clone, Copy)]
pub struct Of(pub u64);

/// Aims a request at a rung.
pub fn aim(mut request: Completion, rung: usize, url: &Uri) -> Completion {
    *request.uri_mut() = url.clone();
    request.extensions_mut().insert(To(rung));
    request
}

impl Book {
    /// One page a rung; time starts now.
    pub fn new(rungs: usize) -> Arc<Self> {
        let rungs = (0..rungs).map(|_| Page::default()).collect();
        Arc::new(Book { started: Instant::now(), rungs })
    }

    pub fn pages(&self) -> &[Page] {
        &self.rungs
    }
}

impl Page {
    fn lock(&self) -> MutexGuard<'_, Vec<CallRecord>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn calls(&self) -> Vec<CallRecord> {
        self.lock().clone()
    }
}

impl Wire {
    /// A client with room for every agent's connection, so that none is opened twice.
    pub fn new(book: Arc<Book>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client =
            Client::builder(TokioExecutor::new()).pool_max_idle_per_host(usize::MAX).build(connector);
        Wire { client, book }
    }
}

impl Service<Completion> for Wire {
    type Response = Response<Incoming>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.client.poll_ready(cx)
    }

    fn call(&mut self, request: Completion) -> Self::Future {
        let rung = request.extensions().get::<To>().map_or(0, |to| to.0);
        let task = request.extensions().get::<Of>().map(|of| of.0);
        let entry = Entry::begin(self.book.clone(), rung, task);
        let call = self.client.request(request);
        Box::pin(async move {
            let reply = call.await;
            entry.end(match reply.as_ref().map(Response::status) {
                Ok(StatusCode::TOO_MANY_REQUESTS) => Outcome::Throttled,
                Ok(status) if status.is_success() => Outcome::Served,
                Ok(_) => Outcome::Failed,
                Err(_) => Outcome::Unreachable,
            });
            reply
        })
    }
}

/// A call being made; if it is dropped, so was the call.
struct Entry {
    book: Arc<Book>,
    rung: usize,
    at: usize,
    outcome: Outcome,
}

impl Entry {
    fn begin(book: Arc<Book>, rung: usize, task: Option<u64>) -> Self {
        let page = &book.rungs[rung];
        page.sent.fetch_add(1, Ordering::Relaxed);
        page.in_flight.fetch_add(1, Ordering::Relaxed);
        let mut calls = page.lock();
        let arrival: Duration = book.started.elapsed();
        let outcome = Outcome::Running;
        calls.push(CallRecord {
            arrival,
            task,
            process: 0,
            outcome,
            ended: None,
            early: false,
            probe: false,
        });
        let at = calls.len() - 1;
        drop(calls);
        Entry { book, rung, at, outcome: Outcome::Aborted }
    }

    fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let page = &self.book.rungs[self.rung];
        page.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.outcome == Outcome::Throttled {
            page.throttled.fetch_add(1, Ordering::Relaxed);
        }
        let mut calls = page.lock();
        calls[self.at].outcome = self.outcome;
        calls[self.at].ended = Some(self.book.started.elapsed());
    }
}
