// Command real-node has the small programs of the node in tests/real. It is linked statically, so that it also runs in
// an image without any other file.
//
//	real-node pause                                   the process of a pod's sandbox
//	real-node cards RESOURCE ID...                    a device plugin that offers one device for each ID
//	real-node claims KUBECONFIG NODE PRODUCT ID...    a DRA driver that publishes one device for each ID
package main

import (
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	switch os.Args[1] {
	case "pause":
		pause()
	case "cards":
		for {
			log.Print(offer(os.Args[2], os.Args[3:]))
			time.Sleep(200 * time.Millisecond)
		}
	case "claims":
		log.Fatal(serveClaims(os.Args[2], os.Args[3], os.Args[4], os.Args[5:]))
	default:
		log.Fatal("the first argument must be pause, cards or claims")
	}
}

// pause waits for SIGTERM, and reaps the processes that the containers of its pod leave.
func pause() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for each := range signals {
		if each != syscall.SIGCHLD {
			return
		}
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}
