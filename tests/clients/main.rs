//! The stack around the clients that people use, over real sockets: what each client makes of requests,
//! replies and errors on the way, and that nothing is lost there.

#[path = "../support/grpc.rs"]
mod grpc;
#[path = "../support/server.rs"]
mod server;
mod with_herd;
mod with_hyper;
mod with_reqwest;
mod with_tonic;

use std::time::Duration;
use tokio::time::{Instant, sleep};
use tower_herd::{Fleet, Provider, ProviderSettings};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn provider(name: &str, ceiling: u32) -> Provider {
    Fleet::local().configure(name, ProviderSettings::new().ceiling(ceiling)).unwrap()
}

/// What stands in one rung. A macro: the type of the stack has a different inner service in each use.
macro_rules! gates {
    ($provider:expr) => {
        tower::ServiceBuilder::new()
            .layer(tower_herd::RetryAfterLayer::new($provider))
            .layer(tower_herd::FleetLimitLayer::new($provider))
            .layer(tower_herd::ClassifyLayer::new($provider))
            .layer(tower_herd::AttemptTimeoutLayer::default())
            .into_inner()
    };
}
use gates;

/// Waits until the provider holds nothing any more.
async fn settled(provider: &Provider) {
    let end = Instant::now() + secs(15);
    while (provider.in_flight(), provider.waiting()) != (0, 0) {
        assert!(Instant::now() < end, "not given back: {provider:?}");
        sleep(ms(5)).await;
    }
}

/// A port that refuses whoever connects, and stays ours until it is listened at.
fn refusing() -> (tokio::net::TcpSocket, String) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

/// The time between the first call that a server saw and each later one.
fn gaps(times: &[Instant]) -> Vec<Duration> {
    times[1..].iter().map(|time| time.duration_since(times[0])).collect()
}
