//! A gRPC server whose answers are a function of the number of the call. Messages are strings.
#![allow(dead_code, reason = "every test binary includes this file and uses a part of it")]

use bytes::{Buf, BufMut};
use futures_util::{Stream, StreamExt, stream};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};

/// Strings as they are: no protoc, no prost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;
    fn encoder(&mut self) -> Text {
        Text
    }
    fn decoder(&mut self) -> Text {
        Text
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;
    fn encode(&mut self, text: String, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;
    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = buf.copy_to_bytes(buf.remaining());
        String::from_utf8(bytes.into()).map(Some).map_err(|_| Status::internal("not a text"))
    }
}

/// Messages, then a status: without messages it comes in the head (trailers only), else in the trailers.
#[derive(Clone, Debug)]
pub struct Answer {
    pub messages: Vec<&'static str>,
    pub every: Duration,
    pub end: Result<(), Status>,
}

pub fn says(messages: &[&'static str]) -> Answer {
    Answer { messages: messages.to_vec(), every: Duration::ZERO, end: Ok(()) }
}

pub fn fails(status: Status) -> Answer {
    Answer { messages: Vec::new(), every: Duration::ZERO, end: Err(status) }
}

/// A status with a pushback.
pub fn pushing_back(mut status: Status, millis: &'static str) -> Status {
    status.metadata_mut().insert("grpc-retry-pushback-ms", millis.parse().unwrap());
    status
}

/// The same with a `google.rpc.RetryInfo` among its details, as Google's services and their libraries send it.
pub fn retry_info(status: &Status, wait: Duration) -> Status {
    // Protobuf by hand: a field's number and type, then its value.
    let number = |field: u8, number: u64| {
        let mut field = vec![field << 3];
        let mut rest = number;
        while rest > 0x7f {
            field.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        field.push(rest as u8);
        field
    };
    let bytes =
        |field: u8, bytes: &[u8]| [&[field << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let any = |kind: &[u8], value: &[u8]| {
        let name = [b"type.googleapis.com/google.rpc.", kind].concat();
        bytes(3, &[bytes(1, &name), bytes(2, value)].concat())
    };
    let delay = [number(1, wait.as_secs()), number(2, u64::from(wait.subsec_nanos()))].concat();
    let details = [
        number(1, status.code() as u64),
        bytes(2, status.message().as_bytes()),
        any(b"ErrorInfo", &bytes(1, b"RATE_LIMIT_EXCEEDED")),
        any(b"RetryInfo", &bytes(1, &delay)),
    ];
    Status::with_details(status.code(), status.message(), details.concat().into())
}

impl Answer {
    pub fn then(mut self, status: Status) -> Self {
        self.end = Err(status);
        self
    }
    pub fn every(mut self, time: Duration) -> Self {
        self.every = time;
        self
    }
}

/// When a call came, and what it said.
#[derive(Clone, Debug)]
pub struct Call {
    pub at: Instant,
    pub messages: Vec<String>,
}

pub type Calls = Arc<Mutex<Vec<Call>>>;
type Answers = Arc<dyn Fn(usize) -> Answer + Send + Sync>;

pub struct Server {
    pub url: String,
    pub calls: Calls,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Server {
    pub async fn start(answers: impl Fn(usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let calls = Calls::default();
        let script = Script { answers: Arc::new(answers), calls: calls.clone() };
        let accepting = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                socket.set_nodelay(true).ok();
                let script = script.clone();
                let service = hyper::service::service_fn(move |request| {
                    let script = script.clone();
                    async move {
                        Ok::<_, Infallible>(tonic::server::Grpc::new(Text).streaming(script, request).await)
                    }
                });
                tokio::spawn(async move {
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    builder.serve_connection(TokioIo::new(socket), service).await.ok();
                });
            }
        });
        Server { url, calls, accepting }
    }

    pub fn channel(&self) -> tonic::transport::Channel {
        tonic::transport::Endpoint::from_shared(self.url.clone()).unwrap().connect_lazy()
    }

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

/// The one method: it reads all that is sent, and answers.
#[derive(Clone)]
struct Script {
    answers: Answers,
    calls: Calls,
}

type Messages = Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;

impl tower::Service<tonic::Request<tonic::Streaming<String>>> for Script {
    type Response = tonic::Response<Messages>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: tonic::Request<tonic::Streaming<String>>) -> Self::Future {
        let number = {
            let mut calls = self.calls.lock().unwrap();
            calls.push(Call { at: Instant::now(), messages: Vec::new() });
            calls.len() - 1
        };
        let Script { answers, calls } = self.clone();
        Box::pin(async move {
            let mut incoming = request.into_inner();
            while let Some(message) = incoming.message().await? {
                calls.lock().unwrap()[number].messages.push(message);
            }
            let Answer { messages, every, end } = answers(number);
            if messages.is_empty() {
                end.clone()?;
            }
            let messages = stream::iter(messages).then(move |message| async move {
                sleep(every).await;
                Ok(message.to_owned())
            });
            let end = stream::iter(end.err().map(Err));
            Ok(tonic::Response::new(Box::pin(messages.chain(end)) as Messages))
        })
    }
}
