// A webhook that does nothing: it allows every pod, at any path. With -pin, /mutate answers with that JSON Patch.
//
// The bench compares our webhook with this one, which shows the API server's own cost of two webhooks, and of a patch.
// Like our webhook, it uses HTTP/1.1 and keeps connections open. It parses only the part of a review that it needs.
package main

import (
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"path/filepath"
)

type review struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Request    *struct {
		UID string `json:"uid"`
	} `json:"request,omitempty"`
	Response *response `json:"response,omitempty"`
}

type response struct {
	UID       string `json:"uid"`
	Allowed   bool   `json:"allowed"`
	PatchType string `json:"patchType,omitempty"`
	Patch     []byte `json:"patch,omitempty"` // encoding/json encodes it in Base64, as a review requires
}

// answer allows the request, with this patch if it is not empty.
func answer(patch string) http.HandlerFunc {
	return func(writer http.ResponseWriter, request *http.Request) {
		var asked review
		if err := json.NewDecoder(request.Body).Decode(&asked); err != nil || asked.Request == nil {
			http.Error(writer, "not an AdmissionReview", http.StatusBadRequest)
			return
		}
		allowed := response{UID: asked.Request.UID, Allowed: true}
		if patch != "" {
			allowed.PatchType, allowed.Patch = "JSONPatch", []byte(patch)
		}
		asked.Request, asked.Response = nil, &allowed
		writer.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(writer).Encode(asked); err != nil {
			log.Print(err)
		}
	}
}

func main() {
	certificates := flag.String("cert-dir", ".", "directory of tls.crt and tls.key")
	pin := flag.String("pin", "", "JSON Patch that /mutate answers with")
	flag.Parse()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	routes := http.NewServeMux()
	routes.Handle("/", answer(""))
	routes.Handle("/mutate", answer(*pin))
	server := http.Server{
		Handler:      routes,
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, // not HTTP/2
	}
	fmt.Printf("https://%s\n", listener.Addr())
	log.Fatal(server.ServeTLS(
		listener, filepath.Join(*certificates, "tls.crt"), filepath.Join(*certificates, "tls.key"),
	))
}
