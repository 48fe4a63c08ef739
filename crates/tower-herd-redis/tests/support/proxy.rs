//! A proxy that breaks what runs through it.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    time::sleep,
};

/// What becomes of the bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flow {
    #[default]
    Pass,
    /// They are taken and thrown away.
    Lose,
    /// They wait here until this changes.
    Hold,
}

#[derive(Clone, Copy, Debug, Default)]
struct Plan {
    up: Flow,
    down: Flow,
    delay: Duration,
    refuse: bool,
    cuts: u64,
}

/// Stands in front of a server, on a thread of its own: a test that blocks does not stop it.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    plan: watch::Sender<Plan>,
    accepted: Arc<AtomicUsize>,
}

impl Proxy {
    pub fn start(target: u16) -> Self {
        let (plan, watched) = watch::channel(Plan::default());
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let accepted = Arc::new(AtomicUsize::new(0));
        let counted = accepted.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(run(listener, target, watched, &counted));
        });
        Proxy { port, plan, accepted }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Connections that were made so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// From clients to the server.
    pub fn up(&self, flow: Flow) {
        self.plan.send_modify(|plan| plan.up = flow);
    }

    /// From the server to clients.
    pub fn down(&self, flow: Flow) {
        self.plan.send_modify(|plan| plan.down = flow);
    }

    /// Connections stay open, and nothing comes through.
    pub fn black_hole(&self) {
        self.up(Flow::Lose);
        self.down(Flow::Lose);
    }

    pub fn heal(&self) {
        self.plan.send_modify(|plan| *plan = Plan { cuts: plan.cuts, ..Plan::default() });
    }

    /// Each piece is late by so much, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.plan.send_modify(|plan| plan.delay = delay);
    }

    /// Closes all connections; new ones are accepted.
    pub fn cut(&self) {
        self.plan.send_modify(|plan| plan.cuts += 1);
    }

    /// Closes new connections at once.
    pub fn refuse(&self, refuse: bool) {
        self.plan.send_modify(|plan| plan.refuse = refuse);
    }
}

async fn run(
    listener: std::net::TcpListener,
    target: u16,
    plan: watch::Receiver<Plan>,
    accepted: &AtomicUsize,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    let mut end = plan.clone();
    loop {
        let client = tokio::select! {
            client = listener.accept() => client,
            () = async { while end.changed().await.is_ok() {} } => return,
        };
        let Ok((client, _)) = client else { continue };
        accepted.fetch_add(1, Ordering::Relaxed);
        if plan.borrow().refuse {
            continue;
        }
        let plan = plan.clone();
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else { return };
            for side in [&client, &server] {
                side.set_nodelay(true).ok();
            }
            let cuts = plan.borrow().cuts;
            let mut cut = plan.clone();
            let ((from_client, to_client), (from_server, to_server)) =
                (client.into_split(), server.into_split());
            let up = pump(from_client, to_server, plan.clone(), |plan| plan.up);
            let down = pump(from_server, to_client, plan, |plan| plan.down);
            tokio::select! {
                () = up => {}
                () = down => {}
                _ = cut.wait_for(|plan| plan.cuts != cuts) => {}
            }
        });
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut plan: watch::Receiver<Plan>,
    flow: fn(&Plan) -> Flow,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(read @ 1..) = from.read(&mut buffer).await else { return };
        let delay = plan.borrow().delay;
        if !delay.is_zero() {
            sleep(delay).await;
        }
        let Ok(now) = plan.wait_for(|plan| flow(plan) != Flow::Hold).await.map(|plan| flow(&plan)) else {
            return;
        };
        if now == Flow::Pass && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
