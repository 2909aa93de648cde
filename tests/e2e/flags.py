"""The command lines of the control plane's servers."""

from __future__ import annotations

from tests.e2e.layout import Layout


def etcd(layout: Layout) -> list[str]:
    """One member, without fsync: its data need not outlive the machine."""
    url = f"http://127.0.0.1:{layout.etcd_port}"
    return [
        f"--data-dir={layout.directory / 'etcd'}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls=http://127.0.0.1:{layout.peer_port}",
        "--unsafe-no-fsync",
    ]


def apiserver(layout: Layout, *, service_account_admission: bool) -> list[str]:
    """RBAC on, static tokens, TokenRequest possible, a self-signed certificate in ``layout.certs``.

    Webhooks that are Services are called at the Services' endpoints: there is no kube-proxy to take other calls there.
    """
    issuer = "https://kubernetes.default.svc"
    admission = [] if service_account_admission else ["--disable-admission-plugins=ServiceAccount"]
    return [
        f"--etcd-servers=http://127.0.0.1:{layout.etcd_port}",
        f"--cert-dir={layout.certs}",
        f"--secure-port={layout.apiserver_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--service-account-key-file={layout.signing_key}",
        f"--service-account-signing-key-file={layout.signing_key}",
        f"--service-account-issuer={issuer}",
        f"--api-audiences={issuer}",
        "--service-cluster-ip-range=10.0.0.0/24",
        f"--token-auth-file={layout.token_file}",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        "--enable-aggregator-routing=true",
        *admission,
    ]


def scheduler(layout: Layout) -> list[str]:
    """The default profile, without leader election."""
    return client_flags(layout, layout.scheduler_port)


def controller_manager(layout: Layout) -> list[str]:
    """All controllers but those that would judge our nodes by the kubelet they do not have."""
    return [
        *client_flags(layout, layout.manager_port),
        "--controllers=*,-nodelifecycle,-ttl,-nodeipam",
        f"--service-account-private-key-file={layout.signing_key}",
        f"--root-ca-file={layout.certificate('apiserver')}",
    ]


def client_flags(layout: Layout, port: int) -> list[str]:
    """What scheduler and controller manager have in common."""
    return [
        f"--kubeconfig={layout.admin_kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={layout.certs}",
    ]
