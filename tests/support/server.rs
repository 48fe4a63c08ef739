//! A small HTTP server whose answers are a function, and that notes when calls come and how many run.
#![allow(dead_code, reason = "every test binary includes this file and uses a part of it")]

use bytes::Bytes;
use http_body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep};

/// What one call is answered with.
#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    after: Duration,
    parts: u32,
    every: Duration,
    breaks: bool,
    body: String,
}

pub fn answer(status: u16) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        after: Duration::ZERO,
        parts: 1,
        every: Duration::ZERO,
        breaks: false,
        body: "ok".to_owned(),
    }
}

impl Answer {
    pub fn header(mut self, name: &'static str, value: impl std::fmt::Display) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }
    pub fn body(mut self, body: impl Into<String>) -> Self {
        self.body = body.into();
        self
    }
    /// The head comes after this long.
    pub fn after(mut self, time: Duration) -> Self {
        self.after = time;
        self
    }
    /// The body comes so many times, this far apart.
    pub fn parts(mut self, parts: u32, every: Duration) -> Self {
        (self.parts, self.every) = (parts, every);
        self
    }
    /// The connection is closed before the end of the body.
    pub fn breaks(mut self) -> Self {
        self.breaks = true;
        self
    }
}

#[derive(Debug, Default)]
pub struct Counts {
    /// When calls came.
    pub came: Mutex<Vec<Instant>>,
    pub running: AtomicUsize,
    pub peak: AtomicUsize,
}

impl Counts {
    pub fn calls(&self) -> usize {
        self.came.lock().unwrap().len()
    }
    pub fn times(&self) -> Vec<Instant> {
        self.came.lock().unwrap().clone()
    }
    pub fn running(&self) -> usize {
        self.running.load(SeqCst)
    }
    pub fn peak(&self) -> usize {
        self.peak.load(SeqCst)
    }
}

pub struct Server {
    pub url: String,
    pub counts: Arc<Counts>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

type Function = dyn Fn(usize, &http::request::Parts) -> Answer + Send + Sync;

impl Server {
    /// `answers` gets the number of the call, from 0.
    pub async fn start(
        answers: impl Fn(usize, &http::request::Parts) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::on(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap(), answers)
    }

    /// On a listener that is there already.
    pub fn on(
        listener: tokio::net::TcpListener,
        answers: impl Fn(usize, &http::request::Parts) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let counts = Arc::new(Counts::default());
        let (shared, answers): (_, Arc<Function>) = (counts.clone(), Arc::new(answers));
        let accepting = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).ok();
                let (counts, answers) = (shared.clone(), answers.clone());
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| {
                        serve(counts.clone(), answers.clone(), request)
                    });
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    // Broken connections are part of the tests.
                    builder.serve_connection(TokioIo::new(socket), service).await.ok();
                });
            }
        });
        Server { url, counts, accepting }
    }
}

struct Running(Arc<Counts>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

async fn serve(
    counts: Arc<Counts>,
    answers: Arc<Function>,
    request: http::Request<hyper::body::Incoming>,
) -> Result<http::Response<Parts>, Infallible> {
    let number = {
        let mut came = counts.came.lock().unwrap();
        came.push(Instant::now());
        came.len() - 1
    };
    counts.peak.fetch_max(counts.running.fetch_add(1, SeqCst) + 1, SeqCst);
    let running = Running(counts);
    let (parts, body) = request.into_parts();
    http_body_util::BodyExt::collect(body).await.ok();
    let answer = answers(number, &parts);
    if !answer.after.is_zero() {
        sleep(answer.after).await;
    }
    let mut reply = http::Response::builder().status(answer.status);
    for (name, value) in &answer.headers {
        reply = reply.header(*name, value);
    }
    let body = Parts {
        left: answer.parts,
        data: answer.body.into(),
        every: answer.every,
        breaks: answer.breaks,
        sleep: None,
        running: Some(running),
    };
    Ok(reply.body(body).unwrap())
}

/// A call runs until its last part is handed out: before the client can have seen it.
pub struct Parts {
    left: u32,
    data: Bytes,
    every: Duration,
    breaks: bool,
    sleep: Option<Pin<Box<Sleep>>>,
    running: Option<Running>,
}

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if let Some(sleep) = &mut self.sleep {
            ready!(sleep.as_mut().poll(cx));
        }
        if self.left == 0 {
            self.running = None;
            return Poll::Ready(None);
        }
        if self.left == 1 && self.breaks {
            self.running = None;
            return Poll::Ready(Some(Err(std::io::ErrorKind::BrokenPipe.into())));
        }
        self.left -= 1;
        if self.left == 0 {
            self.running = None;
        } else {
            self.sleep = Some(Box::pin(sleep(self.every)));
        }
        Poll::Ready(Some(Ok(Frame::data(self.data.clone()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }
}
