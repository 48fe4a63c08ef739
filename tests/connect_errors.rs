//! What real clients' errors prove, over real sockets.

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use std::time::Duration;
use tokio::{io::AsyncReadExt, net::TcpListener};
use tower::{Layer, ServiceExt, service_fn};
use tower_herd::{
    AttemptTimeout, AttemptTimeoutLayer, BoxError, ClassifyLayer, Executed, Fleet, Kind, NotExecuted,
    classify::signal_of_error,
};

type Request = http::Request<Full<Bytes>>;

fn post(uri: &str) -> Request {
    http::Request::post(uri).body(Full::from("{}")).unwrap()
}

/// The error of one call through the sensor and hyper-util's client.
async fn error_of(uri: &str) -> BoxError {
    let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
    let provider = Fleet::local().provider("p");
    let stack = (ClassifyLayer::new(&provider), AttemptTimeoutLayer::new(Duration::from_millis(300)));
    match stack.layer(client).oneshot(post(uri)).await {
        Ok(reply) => panic!("an answer: {}", reply.status()),
        Err(error) => error,
    }
}

#[tokio::test]
async fn a_closed_port_proves_that_nothing_was_executed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let error = error_of(&uri).await;
    assert!(NotExecuted::is_proven_by(&*error), "{error:?}");
}

#[tokio::test]
async fn so_does_any_other_failure_to_connect() {
    type Connection = hyper_util::rt::TokioIo<tokio::net::TcpStream>;
    let connector = service_fn(|_: http::Uri| {
        std::future::ready(Err::<Connection, _>(std::io::Error::other("no route")))
    });
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let error = client.request(post("http://a/")).await.unwrap_err();
    assert_eq!(signal_of_error(&error).executed, Executed::No, "{error:?}");
}

#[tokio::test]
async fn a_connection_that_breaks_after_the_request_proves_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}/", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(socket.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0));
    });
    let error = error_of(&uri).await;
    let signal = signal_of_error(&*error);
    assert_eq!((signal.kind, signal.executed), (Kind::Failed, Executed::Maybe), "{error:?}");
    server.await.unwrap();
}

#[tokio::test]
async fn a_silent_provider_ends_in_a_typed_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = error_of(&format!("http://{}/", listener.local_addr().unwrap())).await;
    assert!(error.is::<AttemptTimeout>(), "{error:?}");
    assert_eq!(signal_of_error(&*error).executed, Executed::Maybe);
}
