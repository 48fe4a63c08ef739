//! What came over a wire, and what was reported.
#![allow(dead_code, reason = "each test file uses its part")]

use http::HeaderMap;
use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tower::Service;
use tower_herd::{
    HasTask, Task,
    observe::{Event, Observe},
};

pub type Request = http::Request<String>;
pub type Response = http::Response<String>;

pub const MS: fn(u64) -> Duration = Duration::from_millis;
pub const S: fn(u64) -> Duration = Duration::from_secs;

pub fn get() -> Request {
    http::Request::new(String::new())
}

pub fn grpc(mut request: Request) -> Request {
    request.headers_mut().insert("content-type", "application/grpc+proto".parse().unwrap());
    request
}

pub fn of(task: &Task, mut request: Request) -> Request {
    request.set_task(task.clone());
    request
}

/// Over HTTP/2 where it is gRPC.
pub fn reply(status: u16, headers: &[(&'static str, &str)]) -> Response {
    let is_grpc = headers.iter().any(|(name, _)| name.starts_with("grpc-"));
    let version = if is_grpc { http::Version::HTTP_2 } else { http::Version::HTTP_11 };
    let reply = http::Response::builder().status(status).version(version);
    headers
        .iter()
        .fold(reply, |reply, (name, value)| reply.header(*name, *value))
        .body(String::new())
        .unwrap()
}

type Seen = (HeaderMap, Option<Task>);
type Answers = dyn Fn(usize, &Request) -> Response + Send + Sync;

/// Answers at once, and notes what came.
#[derive(Clone)]
pub struct Wire {
    answers: Arc<Answers>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Wire {
    pub fn new(answers: impl Fn(usize, &Request) -> Response + Send + Sync + 'static) -> Self {
        Wire { answers: Arc::new(answers), seen: Arc::default() }
    }
    pub fn service(&self) -> Self {
        self.clone()
    }
    pub fn headers(&self) -> Vec<HeaderMap> {
        self.seen.lock().unwrap().iter().map(|seen| seen.0.clone()).collect()
    }
    pub fn tasks(&self) -> Vec<Option<Task>> {
        self.seen.lock().unwrap().iter().map(|seen| seen.1.clone()).collect()
    }
}

impl Service<Request> for Wire {
    type Response = Response;
    type Error = Infallible;
    type Future = Ready<Result<Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let mut seen = self.seen.lock().unwrap();
        seen.push((request.headers().clone(), request.task().cloned()));
        ready(Ok((self.answers)(seen.len() - 1, &request)))
    }
}

/// Notes who was reported to repeat our calls.
#[derive(Clone, Default)]
pub struct InnerRetries(Arc<Mutex<Vec<(String, u32)>>>);

impl InnerRetries {
    pub fn all(&self) -> Vec<(String, u32)> {
        self.0.lock().unwrap().clone()
    }
}

impl Observe for InnerRetries {
    fn observe(&self, event: &Event<'_>) {
        if let Event::InnerRetries { provider, attempts, .. } = event {
            self.0.lock().unwrap().push(((*provider).to_owned(), *attempts));
        }
    }
}
