//! A provider in a few lines: what it answers is a function of the n-th call; it notes when calls came.
#![allow(dead_code, reason = "every test binary includes this file and uses a part of it")]

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::Service;
use tower_herd::{HasTask, Safety, Task};

pub type Request = http::Request<String>;
pub type Response = http::Response<String>;

/// What a call is answered with, and after how long.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: &'static str,
    pub after: Duration,
}

pub fn answer(status: u16) -> Answer {
    Answer { status, headers: vec![], body: "", after: Duration::ZERO }
}

impl Answer {
    pub fn after(mut self, time: Duration) -> Self {
        self.after = time;
        self
    }
    pub fn header(mut self, name: &'static str, value: impl std::fmt::Display) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }
    pub fn body(mut self, body: &'static str) -> Self {
        self.body = body;
        self
    }
}

type Answers = dyn Fn(usize, &Request) -> Answer + Send + Sync;
/// When a call came, of which task, and where to.
type Seen = (Instant, Option<Task>, String);

#[derive(Clone)]
pub struct Script {
    answers: Arc<Answers>,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    pub in_flight: Arc<AtomicUsize>,
    pub peak: Arc<AtomicUsize>,
}

impl Script {
    pub fn new(answers: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static) -> Self {
        Script {
            answers: Arc::new(answers),
            seen: Arc::default(),
            in_flight: Arc::default(),
            peak: Arc::default(),
        }
    }
    pub fn always(answer: Answer) -> Self {
        Script::new(move |_, _| answer.clone())
    }
    pub fn calls(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
    /// When the calls came, in milliseconds after `start`.
    pub fn times(&self, start: Instant) -> Vec<u64> {
        self.seen.lock().unwrap().iter().map(|(at, ..)| at.duration_since(start).as_millis() as u64).collect()
    }
}

struct InFlight(Arc<AtomicUsize>);
impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service<Request> for Script {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: Request) -> Self::Future {
        let nth = {
            let mut seen = self.seen.lock().unwrap();
            seen.push((Instant::now(), request.task().cloned(), request.uri().to_string()));
            seen.len() - 1
        };
        let answer = (self.answers)(nth, &request);
        let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(now, Ordering::SeqCst);
        let guard = InFlight(self.in_flight.clone());
        Box::pin(async move {
            tokio::time::sleep(answer.after).await;
            drop(guard);
            let mut response = http::Response::builder().status(answer.status);
            for (name, value) in &answer.headers {
                response = response.header(*name, value);
            }
            Ok(response.body(answer.body.to_owned()).unwrap())
        })
    }
}

/// A request of a task with this id, that may be repeated.
pub fn request(id: u64) -> Request {
    let mut request = http::Request::post("http://placeholder.example/").body(String::new()).unwrap();
    request.extensions_mut().insert(Task::new(id).deadline_in(Duration::from_secs(600)));
    request.extensions_mut().insert(Safety::Costly);
    request
}

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub type Boxed = tower::util::BoxCloneService<Request, Response, tower_herd::BoxError>;

/// Pause, limit and sensor of one provider around it.
pub fn rung<S>(provider: &tower_herd::Provider, inner: S) -> Boxed
where
    S: Service<Request, Response = Response> + Clone + Send + 'static,
    S::Error: Into<tower_herd::BoxError>,
    S::Future: Send,
{
    Boxed::new(
        tower::ServiceBuilder::new()
            .layer(tower_herd::RetryAfterLayer::new(provider))
            .layer(tower_herd::FleetLimitLayer::new(provider).until_reply())
            .layer(tower_herd::ClassifyLayer::new(provider).replies())
            .service(inner),
    )
}

/// The retry layer around it, without a budget that could get in the way.
pub fn retrying(inner: Boxed) -> Boxed {
    let layer = tower_herd::JitteredRetryLayer::new().budget(tower_herd::retry::Unlimited).seed(1);
    Boxed::new(tower::Layer::layer(&layer, inner))
}

/// A request of a task that ends after this time.
pub fn until(id: u64, deadline: Duration) -> Request {
    let mut request = request(id);
    request.extensions_mut().insert(Task::new(id).deadline_in(deadline));
    request
}
